// Low-rank updates of a layer's output, another adapter for each row: `low`, the few columns between A and B, is an
// operation of its own over tiles of rows of one adapter; the product with B is added where the layer's own product has
// left its sums. Each sum is in an order of its own row, whoever else is in the tile.
//
// Packed matrices of one adapter in one layer, its rank r rounded up to an even number. A: the columns of all parts one
// after the other (r each), in panels of L of them, [panels][in / 2][2][L] for float32, [panels][in / 2][L][2] for
// bfloat16. B: for each part, blocks of L columns of the layer's output that it reaches into, zeros where it does not:
// [blocks][r][L], or [blocks][r / 2][L][2]. Blocks are cut along the layer's output; of a gated layer, along each half.
#pragma once

#include "abi.h"
#include "vec.h"

#include <algorithm>
#include <vector>

constexpr int kLoraRows = 8;   // most rows of a tile; Python cuts them
constexpr int kLoraParts = 4;  // most parts of a layer

static inline int64_t even(int64_t n) {
    return (n + 1) / 2 * 2;
}

// Blocks of B before `part`.
static inline int64_t blocks_before(const LoraSite& site, int64_t part) {
    int64_t blocks = 0, first = 0;
    for (int64_t p = 0; p < part; p++) {
        const int64_t last = first + site.widths[p];
        blocks += site.gated ? (site.widths[p] + L - 1) / L : (last + L - 1) / L - first / L;
        first = last;
    }
    return blocks;
}

static inline int64_t low_panels(const LoraSite& site, int64_t rank) {
    return (site.parts * even(rank) + L - 1) / L;
}

// One part's matrices, a [rank, in] and b [outputs, rank], into those of an adapter whose largest rank is `most`. What
// they do not reach stays as it is.
template <class T>
static void pack_lora(const LoraSite& site, int64_t part, const T* a, const T* b, int64_t rank, int64_t most, T* packed_a,
                      T* packed_b) {
    constexpr int pair = sizeof(T) == 2 ? 2 : 1;
    const int64_t r = even(most), panel = even(site.in) * L;
    std::vector<T*> columns;
    for (int64_t column = part * r; column < part * r + rank; column++)
        columns.push_back(packed_a + column / L * panel + column % L * pair);
    for (int64_t i = 0; i < site.in; i += pair) {
        const size_t bytes = std::min<int64_t>(pair, site.in - i) * sizeof(T);
        for (int64_t k = 0; k < rank; k++) std::memcpy(columns[k] + i * L, a + k * site.in + i, bytes);
    }
    int64_t first = 0;
    for (int64_t p = 0; p < part && !site.gated; p++) first += site.widths[p];
    T* blocks = packed_b + blocks_before(site, part) * r * L;
    for (int64_t o = 0; o < site.widths[part]; o++) {
        const int64_t column = first % L + o;
        T* to = blocks + column / L * r * L + column % L * pair;
        for (int64_t k = 0; k < rank; k += pair)
            std::memcpy(to + k * L, b + o * rank + k, std::min<int64_t>(pair, rank - k) * sizeof(T));
    }
}

static inline void load_pair(const float* p, vf& first, vf& second) {
    first = load(p), second = load(p + L);
}

static inline void load_pair(const bf16* p, vf& first, vf& second) {
    vu both;
    std::memcpy(&both, p, sizeof both);
    first = (vf)(both << 16), second = (vf)(both & 0xffff0000u);
}

// low[r] [L] = x[r] @ panel, for R rows, in two sums each.
template <int R, class T>
static inline void shrink_plain(const T* const* x, const T* panel, int64_t in, T* const* low) {
    vf acc[R][2] = {};
    for (int64_t i = 0; i < in; i += 2) {
        vf first, second;
        load_pair(panel + i * L, first, second);
        const bool paired = i + 1 < in;
        for (int r = 0; r < R; r++) {
            acc[r][0] += widen(x[r][i]) * first;
            acc[r][1] += (paired ? widen(x[r][i + 1]) : 0.0f) * second;
        }
    }
    for (int r = 0; r < R; r++) store(low[r], acc[r][0] + acc[r][1]);
}

// sum + low @ block.
template <class T>
static inline vf add_block_plain(vf sum, const T* low, const T* block, int64_t rank) {
    for (int64_t k = 0; k < rank; k += 2) {
        vf first, second;
        load_pair(block + k * L, first, second);
        sum += widen(low[k]) * first;
        sum += widen(low[k + 1]) * second;
    }
    return sum;
}

// c [R][NR] += low @ B for R rows of one adapter, a block for each half of the panel; each sum as in `add_block`.
template <int R, class T>
static inline void add_rows_plain(const T* const* low, int64_t stride, const T* const* block, int64_t rank, float* c) {
    for (int half = 0; half < 2; half++) {
        vf acc[R];
        for (int r = 0; r < R; r++) acc[r] = load(c + r * NR + half * L);
        for (int64_t k = 0; k < rank; k += 2) {
            vf first, second;
            load_pair(block[half] + k * L, first, second);
            for (int r = 0; r < R; r++) {
                acc[r] += widen(low[half][r * stride + k]) * first;
                acc[r] += widen(low[half][r * stride + k + 1]) * second;
            }
        }
        for (int r = 0; r < R; r++) store(c + r * NR + half * L, acc[r]);
    }
}

template <int R>
static __attribute__((noinline)) void shrink(const float* const* x, const float* panel, int64_t in, float* const* low) {
    shrink_plain<R>(x, panel, in, low);
}

static inline vf add_block(vf sum, const float* low, const float* block, int64_t rank) {
    return add_block_plain(sum, low, block, rank);
}

template <int R>
static __attribute__((noinline)) void add_rows(const float* const* low, int64_t stride, const float* const* block,
                                               int64_t rank, float* c) {
    add_rows_plain<R>(low, stride, block, rank, c);
}

#if ROPEWAY_DPBF16
static inline __m512bh pair_of(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

template <int R>
static __attribute__((noinline)) void shrink(const bf16* const* x, const bf16* panel, int64_t in, bf16* const* low) {
    __m512 acc[R][2];
    const bf16* row[R];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps(), row[r] = x[r];
    auto step = [&](int64_t i, int half) {
        const __m512bh b = (__m512bh)_mm512_loadu_si512(panel + i * L);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][half] = _mm512_dpbf16_ps(acc[r][half], pair_of(row[r] + i), b);
    };
    int64_t i = 0;
    for (; i + 4 <= in; i += 4) {
        _mm_prefetch((const char*)(panel + i * L) + 2048, _MM_HINT_T0);
        _mm_prefetch((const char*)(panel + i * L) + 2112, _MM_HINT_T0);
        step(i, 0);
        step(i + 2, 1);
    }
    for (; i + 2 <= in; i += 2) step(i, 0);
    if (i < in) {
        const __m512bh b = (__m512bh)_mm512_loadu_si512(panel + i * L);
        for (int r = 0; r < R; r++) acc[r][1] = _mm512_dpbf16_ps(acc[r][1], (__m512bh)_mm512_set1_epi32(row[r][i].bits), b);
    }
    for (int r = 0; r < R; r++) store(low[r], (vf)_mm512_add_ps(acc[r][0], acc[r][1]));
}

static inline vf add_block(vf sum, const bf16* low, const bf16* block, int64_t rank) {
    __m512 acc = (__m512)sum;
    for (int64_t k = 0; k < rank; k += 2)
        acc = _mm512_dpbf16_ps(acc, pair_of(low + k), (__m512bh)_mm512_loadu_si512(block + k * L));
    return (vf)acc;
}

template <int R>
static __attribute__((noinline)) void add_rows(const bf16* const* low, int64_t stride, const bf16* const* block,
                                               int64_t rank, float* c) {
    __m512 acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = _mm512_loadu_ps(c + r * NR), acc[r][1] = _mm512_loadu_ps(c + r * NR + L);
    for (int64_t k = 0; k < rank; k += 2) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512bh b = (__m512bh)_mm512_loadu_si512(block[half] + k * L);
            const bf16* p = low[half] + k;
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) acc[r][half] = _mm512_dpbf16_ps(acc[r][half], pair_of(p + r * stride), b);
        }
    }
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(c + r * NR, acc[r][0]);
        _mm512_storeu_ps(c + r * NR + L, acc[r][1]);
    }
}
#else
template <int R>
static __attribute__((noinline)) void shrink(const bf16* const* x, const bf16* panel, int64_t in, bf16* const* low) {
    shrink_plain<R>(x, panel, in, low);
}

static inline vf add_block(vf sum, const bf16* low, const bf16* block, int64_t rank) {
    return add_block_plain(sum, low, block, rank);
}

template <int R>
static __attribute__((noinline)) void add_rows(const bf16* const* low, int64_t stride, const bf16* const* block,
                                               int64_t rank, float* c) {
    add_rows_plain<R>(low, stride, block, rank, c);
}
#endif

// Tasks of the operation: a panel of A for a tile of rows.
static inline int64_t shrink_tasks(const Lora& l, const Batch& batch) {
    return batch.lora_tiles * (l.low_stride / L);
}

template <class T>
static inline void shrink_tile(const Lora& l, const LoraSlot& slot, const int64_t* rows, int64_t count, int64_t panel) {
    const T* x[kLoraRows];
    T* low[kLoraRows];
    for (int64_t r = 0; r < count; r++) {
        x[r] = (const T*)l.x + rows[r] * l.x_stride;
        low[r] = (T*)l.low + rows[r] * l.low_stride + panel * L;
    }
    using Function = void (*)(const T* const*, const T*, int64_t, T* const*);
    static const Function functions[kLoraRows] = {shrink<1>, shrink<2>, shrink<3>, shrink<4>,
                                                  shrink<5>, shrink<6>, shrink<7>, shrink<8>};
    functions[count - 1](x, (const T*)slot.a + panel * even(l.site.in) * L, l.site.in, low);
}

static inline void run_shrink(const Lora& l, const Batch& batch, int64_t task) {
    const int64_t tile = task / (l.low_stride / L), panel = task % (l.low_stride / L);
    const LoraSlot& slot = l.slots[batch.lora_slots[tile]];
    if (panel >= low_panels(l.site, slot.rank)) return;
    const int64_t first = batch.lora_firsts[tile], count = batch.lora_firsts[tile + 1] - first;
    if (l.dtype == kBFloat16)
        shrink_tile<bf16>(l, slot, batch.lora_rows + first, count, panel);
    else
        shrink_tile<float>(l, slot, batch.lora_rows + first, count, panel);
}

// What reaches into a panel of the layer's own product: parts, and their blocks of B by half of the panel.
struct Reach {
    int count;
    struct {
        int half;
        int64_t part, block;
    } each[2 * kLoraParts];
};

static inline Reach reach_of(const LoraSite& site, int64_t panel) {
    Reach reach;
    reach.count = 0;
    for (int half = 0; half < 2; half++) {
        int64_t first = 0, blocks = 0;
        for (int64_t part = 0; part < site.parts; part++) {
            const int64_t last = first + site.widths[part];
            const int64_t from = site.gated ? 0 : first / L, to = ((site.gated ? site.widths[part] : last) + L - 1) / L;
            const int64_t place = site.gated ? panel : 2 * panel + half;
            if (from <= place && place < to && (!site.gated || part == half))
                reach.each[reach.count++] = {half, part, blocks + place - from};
            blocks += to - from;
            first = last;
        }
    }
    return reach;
}

// Asks for the blocks of B that a panel needs, for all adapters of the batch.
static inline void prefetch_reach(const Lora& l, const Batch& batch, const Reach& reach) {
    const int64_t size = l.dtype == kBFloat16 ? 2 : 4;
    for (int64_t g = 0; g < batch.lora_groups; g++) {
        const LoraSlot& slot = l.slots[batch.lora_active[g]];
        const int64_t bytes = even(slot.rank) * L * size;
        for (int i = 0; i < reach.count; i++) {
            const char* block = (const char*)slot.b + reach.each[i].block * bytes;
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(block + at);
        }
    }
}

// The same for any panel of the layer.
template <class T>
static inline void add_run(const Lora& l, const LoraSlot& slot, const Reach& reach, const T* low, int rows, float* c) {
    const int64_t rank = even(slot.rank);
    const T* b = (const T*)slot.b;
    if (reach.count == 2 && reach.each[1].half == 1) {
        const T* lows[2] = {low + reach.each[0].part * rank, low + reach.each[1].part * rank};
        const T* blocks[2] = {b + reach.each[0].block * rank * L, b + reach.each[1].block * rank * L};
        using Function = void (*)(const T* const*, int64_t, const T* const*, int64_t, float*);
        static const Function functions[MR] = {add_rows<1>, add_rows<2>, add_rows<3>, add_rows<4>,  add_rows<5>,  add_rows<6>,
                                               add_rows<7>, add_rows<8>, add_rows<9>, add_rows<10>, add_rows<11>, add_rows<12>};
        return functions[rows - 1](lows, l.low_stride, blocks, rank, c);
    }
    for (int i = 0; i < reach.count; i++) {  // at the edges of parts
        const T* block = b + reach.each[i].block * rank * L;
        for (int r = 0; r < rows; r++) {
            float* to = c + r * NR + reach.each[i].half * L;
            store(to, add_block(load(to), low + r * l.low_stride + reach.each[i].part * rank, block, rank));
        }
    }
}

// c [rows][NR] += low @ B for the rows of adapters; neighbours of one adapter together.
template <class T>
static inline void add_low(const Lora& l, const Batch& batch, const Reach& reach, int64_t row, int rows, float* c) {
    const int64_t* slots = batch.lora_of_row + row;
    for (int first = 0, last; first < rows; first = last) {
        for (last = first + 1; last < rows && slots[last] == slots[first]; last++) {}
        if (slots[first] < 0 || l.slots[slots[first]].rank == 0) continue;
        const T* low = (const T*)l.low + (row + first) * l.low_stride;
        add_run(l, l.slots[slots[first]], reach, low, last - first, c + first * NR);
    }
}

// out[row] = a[ids[row]] @ B of the row's adapter, zeros for the base model; a [vocabulary, rank].
template <class T>
static inline void embed_row(const EmbedDelta& e, const LoraSlot& slot, int64_t row) {
    const int64_t rank = even(slot.rank);
    const T* low = (const T*)slot.a + e.ids[row] * rank;
    float* out = e.out + row * e.width;
    for (int64_t o = 0; o < e.width; o += L) {
        const vf sum = add_block(vf{}, low, (const T*)slot.b + o * rank, rank);
        if (e.width - o >= L)
            store(out + o, sum);
        else
            store_some(out + o, sum, (int)(e.width - o));
    }
}

static inline void run_embed_delta(const EmbedDelta& e, const Batch& batch, int64_t row) {
    const int64_t index = batch.lora_of_row[row];
    if (index < 0 || e.slots[index].rank == 0)
        std::memset(e.out + row * e.width, 0, e.width * sizeof(float));
    else if (e.dtype == kBFloat16)
        embed_row<bf16>(e, e.slots[index], row);
    else
        embed_row<float>(e, e.slots[index], row);
}
