// Row by row: gathering, normalisation, rotary embedding, writes into the KV cache. Computed in float32, rounded once.
#pragma once

#include "abi.h"
#include "gemm.h"
#include "vec.h"

#include <vector>

// Calls `visit(offset, lanes)`; the last may be short.
template <class Visit>
static inline void for_vectors(int64_t width, Visit visit) {
    int64_t i = 0;
    for (; i + L <= width; i += L) visit(i, L);
    if (i < width) visit(i, (int)(width - i));
}

template <class T>
static inline vf load_lanes(const T* p, int n) {
    return n == L ? load(p) : load_some(p, n);
}

template <class T>
static inline void store_lanes(T* p, vf v, int n) {
    if (n == L)
        store(p, v);
    else
        store_some(p, v, n);
}

// A row of a weight in panels: one column of its panel.
template <class T, class U>
static void gather_packed_row(const Gather& g, int64_t row) {
    constexpr int pair = sizeof(T) == 2 ? 2 : 1;
    const int64_t id = g.ids[row], panel = id / NR, column = id % NR;
    const T* source = (const T*)((const char*)g.table + panel * panel_bytes(g.width, g.table_dtype)) + column * pair;
    U* out = (U*)g.out + row * g.width;
    for_vectors(g.width, [&](int64_t i, int n) {
        T lane[L] = {};
        for (int j = 0; j < n; j++) lane[j] = source[(i + j) / pair * NR * pair + (i + j) % pair];
        store_lanes(out + i, load(lane), n);
    });
}

#if ROPEWAY_DPBF16
template <class U>
static void gather_compact_row(const Gather& g, int64_t row) {
    static thread_local std::vector<bf16> space;
    space.resize(g.width);
    const CompactSizes sizes = compact_sizes((g.entries + NR - 1) / NR, g.width);
    expand_column(CompactPanel(g.table, sizes, g.ids[row] / NR), g.ids[row] % NR, space.data());
    U* out = (U*)g.out + row * g.width;
    for_vectors(g.width, [&](int64_t i, int n) { store_lanes(out + i, load_lanes(space.data() + i, n), n); });
}
#endif

template <class T, class U>
static void gather_row(const Gather& g, int64_t row) {
#if ROPEWAY_DPBF16
    if constexpr (sizeof(T) == 2)
        if (g.form == kCompact) return gather_compact_row<U>(g, row);
#endif
    if (g.form != kRows) return gather_packed_row<T, U>(g, row);
    const T* source = (const T*)g.table + g.ids[row] * g.width;
    U* out = (U*)g.out + row * g.width;
    for_vectors(g.width, [&](int64_t i, int n) { store_lanes(out + i, load_lanes(source + i, n), n); });
}

static inline void run_gather(const Gather& g, int64_t row) {
    if (g.table_dtype == kBFloat16)
        g.out_dtype == kBFloat16 ? gather_row<bf16, bf16>(g, row) : gather_row<bf16, float>(g, row);
    else
        g.out_dtype == kBFloat16 ? gather_row<float, bf16>(g, row) : gather_row<float, float>(g, row);
}

// X: of `x`. Y: of `residual`. W: of weight and result.
template <class X, class Y, class W>
static void norm_row(const Norm& m, int64_t row) {
    const X* x = (const X*)m.x + row * m.width;
    Y* residual = m.residual ? (Y*)m.residual + row * m.width : nullptr;
    vf total[2] = {};
    int turn = 0;
    for_vectors(m.width, [&](int64_t i, int n) {
        vf v = load_lanes(x + i, n);
        if (residual) {
            v += load_lanes(residual + i, n);
            store_lanes(residual + i, v, n);
            v = load_lanes(residual + i, n);  // as rounded
        }
        total[turn] += v * v;
        turn ^= 1;
    });
    const float mean = sum_lanes(total[0] + total[1]) / (float)m.width;
    const float scale = 1.0f / __builtin_sqrtf(mean + (float)m.eps);
    const W* weight = (const W*)m.weight;
    W* out = (W*)m.out + row * m.width;
    for_vectors(m.width, [&](int64_t i, int n) {
        vf v = residual ? load_lanes(residual + i, n) : load_lanes(x + i, n);
        store_lanes(out + i, v * scale * load_lanes(weight + i, n), n);
    });
}

template <class X, class Y>
static inline void norm_as(const Norm& m, int64_t row) {
    m.out_dtype == kBFloat16 ? norm_row<X, Y, bf16>(m, row) : norm_row<X, Y, float>(m, row);
}

static inline void run_norm(const Norm& m, int64_t row) {
    if (m.x_dtype == kBFloat16)
        m.residual_dtype == kBFloat16 ? norm_as<bf16, bf16>(m, row) : norm_as<bf16, float>(m, row);
    else
        m.residual_dtype == kBFloat16 ? norm_as<float, bf16>(m, row) : norm_as<float, float>(m, row);
}

template <class T, class C>
static void rotary_row(const Rotary& r, int64_t row) {
    const C *cos = (const C*)r.cos + row * r.dim, *sin = (const C*)r.sin + row * r.dim;
    const int64_t half = r.dim / 2;
    for (int64_t head = 0; head < r.heads; head++) {
        T* x = (T*)r.x + row * r.stride + head * r.dim;
        for_vectors(half, [&](int64_t i, int n) {
            vf a = load_lanes(x + i, n), b = load_lanes(x + half + i, n);
            vf first = a * load_lanes(cos + i, n) + b * load_lanes(sin + i, n);
            vf second = b * load_lanes(cos + half + i, n) + a * load_lanes(sin + half + i, n);
            store_lanes(x + i, first, n);
            store_lanes(x + half + i, second, n);
        });
    }
}

static inline void run_rotary(const Rotary& r, int64_t row) {
    if (r.dtype == kBFloat16)
        r.table_dtype == kBFloat16 ? rotary_row<bf16, bf16>(r, row) : rotary_row<bf16, float>(r, row);
    else
        r.table_dtype == kBFloat16 ? rotary_row<float, bf16>(r, row) : rotary_row<float, float>(r, row);
}
