// Low-rank updates of a layer's output, another adapter for each row. Rows of the same slot are taken together, so that
// they share what is read of its matrices; each sum is in an order of its own row, whoever else is in the tile.
#pragma once

#include "abi.h"
#include "vec.h"

#include <algorithm>
#include <vector>

constexpr int kLoraRows = 8;  // most rows of a tile; Python cuts them

// low[r] = dot(a, x[r]) over `in`, for R rows.
#if ROPEWAY_DPBF16
template <int R>
static inline void dots(const bf16* a, const bf16* const* x, int64_t in, float* low, int64_t stride) {
    __m512 acc[R];
    for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 2 * L <= in; i += 2 * L) {
        const __m512bh av = (__m512bh)_mm512_loadu_si512(a + i);
        for (int r = 0; r < R; r++) acc[r] = _mm512_dpbf16_ps(acc[r], av, (__m512bh)_mm512_loadu_si512(x[r] + i));
    }
    if (i < in) {
        const __mmask32 mask = (__mmask32)((1ull << (in - i)) - 1);
        const __m512bh av = (__m512bh)_mm512_maskz_loadu_epi16(mask, a + i);
        for (int r = 0; r < R; r++)
            acc[r] = _mm512_dpbf16_ps(acc[r], av, (__m512bh)_mm512_maskz_loadu_epi16(mask, x[r] + i));
    }
    for (int r = 0; r < R; r++) low[r * stride] = sum_lanes((vf)acc[r]);
}
#endif

template <int R, class T>
static inline void dots(const T* a, const T* const* x, int64_t in, float* low, int64_t stride) {
    vf acc[R] = {};
    int64_t i = 0;
    for (; i + L <= in; i += L) {
        const vf av = load(a + i);
        for (int r = 0; r < R; r++) acc[r] += av * load(x[r] + i);
    }
    if (i < in) {
        const vf av = load_some(a + i, (int)(in - i));
        for (int r = 0; r < R; r++) acc[r] += av * load_some(x[r] + i, (int)(in - i));
    }
    for (int r = 0; r < R; r++) low[r * stride] = sum_lanes(acc[r]);
}

// out[r][first, first + width) = low[r] @ b[rank][...], for R rows.
template <int R, class T>
static inline void expand(const T* b, int64_t b_stride, int64_t rank, const float* low, int64_t low_stride, int64_t width,
                          float* const* out) {
    for (int64_t o = 0; o < width; o += L) {
        const int some = (int)std::min<int64_t>(L, width - o);
        vf acc[R] = {};
        for (int64_t k = 0; k < rank; k++) {
            const T* p = b + k * b_stride + o;
            const vf bv = some == L ? load(p) : load_some(p, some);
            for (int r = 0; r < R; r++) acc[r] += low[r * low_stride + k] * bv;
        }
        for (int r = 0; r < R; r++) {
            if (some == L)
                store(out[r] + o, acc[r]);
            else
                store_some(out[r] + o, acc[r], some);
        }
    }
}

template <int R, class T>
static __attribute__((noinline)) void lora_rows(const Lora& l, int64_t slot, const int64_t* rows) {
    const int64_t rank = l.ranks[slot];
    static thread_local std::vector<float> space;
    if ((int64_t)space.size() < R * rank) space.resize(R * rank);
    const T* x[R];
    float* out[R];
    for (int r = 0; r < R; r++) {
        x[r] = (const T*)l.x + rows[r] * l.x_stride;
        out[r] = l.out + rows[r] * l.width;
    }
    const T* b = (const T*)l.b + slot * l.max_rank * l.width;
    int64_t first = 0;
    for (int64_t part = 0; part < l.parts; part++) {
        const T* a = (const T*)l.a + (slot * l.parts + part) * l.max_rank * l.in;
        for (int64_t k = 0; k < rank; k++) dots<R>(a + k * l.in, x, l.in, space.data() + k, rank);
        float* at[R];
        for (int r = 0; r < R; r++) at[r] = out[r] + first;
        expand<R>(b + first, l.width, rank, space.data(), rank, l.widths[part], at);
        first += l.widths[part];
    }
}

template <class T>
static inline void lora_tile(const Lora& l, int64_t slot, const int64_t* rows, int64_t count) {
    if (slot < 0 || l.ranks[slot] == 0) {
        for (int64_t r = 0; r < count; r++) std::memset(l.out + rows[r] * l.width, 0, l.width * sizeof(float));
        return;
    }
    using Function = void (*)(const Lora&, int64_t, const int64_t*);
    static const Function functions[kLoraRows] = {lora_rows<1, T>, lora_rows<2, T>, lora_rows<3, T>, lora_rows<4, T>,
                                                  lora_rows<5, T>, lora_rows<6, T>, lora_rows<7, T>, lora_rows<8, T>};
    functions[count - 1](l, slot, rows);
}

static inline void run_lora(const Lora& l, const Batch& batch, int64_t tile) {
    const int64_t first = batch.lora_firsts[tile], count = batch.lora_firsts[tile + 1] - first;
    const int64_t slot = batch.lora_slots[tile];
    if (l.dtype == kBFloat16)
        lora_tile<bf16>(l, slot, batch.lora_rows + first, count);
    else
        lora_tile<float>(l, slot, batch.lora_rows + first, count);
}
