// Matrix products over packed weights. Each result is one sum in the order of the columns, in one float32 accumulator:
// it depends on its own row and column alone, however many rows there are and whoever computes them.
#pragma once

#include "abi.h"
#include "compact.h"
#include "lora.h"
#include "vec.h"

#include <algorithm>

// A panel holds NR columns of the product (rows of the weight). float32: [in][NR]. bfloat16: [ceil(in / 2)][NR][2].
static inline size_t panel_bytes(int64_t in, int64_t dtype) {
    return (size_t)NR * 4 * (dtype == kBFloat16 ? (in + 1) / 2 : in);
}

#if defined(__AVX512F__)
// Two lines of a panel that a tile of R rows comes to: with more than a few there is time to have it wait in the second
// cache. With few the time is that of reading it, which the CPU sees coming by itself; to ask costs a stream 2 %.
template <int R>
static inline void bring_ahead([[maybe_unused]] const char* panel) {
    if constexpr (R > 4) {
        _mm_prefetch(panel + 8192, _MM_HINT_T1);
        _mm_prefetch(panel + 8256, _MM_HINT_T1);
    }
}
#endif

// `c` [R][NR] = a [R, k] @ panel.
#if ROPEWAY_DPBF16
template <int R>
static __attribute__((noinline)) void tile(const bf16* a, int64_t stride, const bf16* panel, int64_t k, float* c) {
    __m512 acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    const char* base = (const char*)a;
    const int64_t step = stride * 2;
    // Four pointers and one index address twelve rows.
    const char *p0 = base, *p1 = base + 3 * step, *p2 = base + 6 * step, *p3 = base + 9 * step;
    const char* b = (const char*)panel;
    auto row = [&](int r) {
        const char* p = r < 3 ? p0 : r < 6 ? p1 : r < 9 ? p2 : p3;
        return p + (r % 3) * step;
    };
    for (int64_t i = k / 2; i > 0; i--) {
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 64);
        bring_ahead<R>(b);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, row(r), 4);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, b0);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, b1);
        }
        p0 += 4, p1 += 4, p2 += 4, p3 += 4, b += 128;
    }
    if (k % 2) {
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            uint16_t last;
            std::memcpy(&last, row(r), 2);
            __m512bh x = (__m512bh)_mm512_set1_epi32(last);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, b0);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, b1);
        }
    }
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(c + r * NR, acc[r][0]);
        _mm512_storeu_ps(c + r * NR + L, acc[r][1]);
    }
}
#else
template <int R>
static __attribute__((noinline)) void tile(const bf16* a, int64_t stride, const bf16* panel, int64_t k, float* c) {
    vf acc[R][2] = {};
    const bf16* b = panel;
    for (int64_t i = 0; i < k; i += 2, b += 2 * NR) {
        vu b0, b1;
        std::memcpy(&b0, b, sizeof b0);
        std::memcpy(&b1, b + NR, sizeof b1);
        vf even0 = (vf)(b0 << 16), even1 = (vf)(b1 << 16);
        vf odd0 = (vf)(b0 & 0xffff0000u), odd1 = (vf)(b1 & 0xffff0000u);
        const bool paired = i + 1 < k;
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            float x = widen(a[r * stride + i]);
            acc[r][0] += x * even0;
            acc[r][1] += x * even1;
            float y = paired ? widen(a[r * stride + i + 1]) : 0.0f;
            acc[r][0] += y * odd0;
            acc[r][1] += y * odd1;
        }
    }
    for (int r = 0; r < R; r++) {
        store(c + r * NR, acc[r][0]);
        store(c + r * NR + L, acc[r][1]);
    }
}
#endif

template <int R>
static __attribute__((noinline)) void tile(const float* a, int64_t stride, const float* panel, int64_t k, float* c) {
    vf acc[R][2] = {};
    const float *p0 = a, *p1 = a + 3 * stride, *p2 = a + 6 * stride, *p3 = a + 9 * stride, *b = panel;
    for (int64_t i = 0; i < k; i++, b += NR) {
        vf b0 = load(b), b1 = load(b + L);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const float* p = r < 3 ? p0 : r < 6 ? p1 : r < 9 ? p2 : p3;
            vf x = splat(p[(r % 3) * stride]);
            acc[r][0] += x * b0;
            acc[r][1] += x * b1;
        }
        p0++, p1++, p2++, p3++;
    }
    for (int r = 0; r < R; r++) {
        store(c + r * NR, acc[r][0]);
        store(c + r * NR + L, acc[r][1]);
    }
}

// By number of rows, from 1 to MR.
template <class T>
static inline void tile_rows(int rows, const T* a, int64_t stride, const T* panel, int64_t k, float* c) {
    using Function = void (*)(const T*, int64_t, const T*, int64_t, float*);
    static const Function functions[MR] = {tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
                                           tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};
    functions[rows - 1](a, stride, panel, k, c);
}

// Cuts `rows` into tiles of nearly equal height; calls `visit(first, rows)`.
template <class Visit>
static inline void for_tiles(int64_t rows, Visit visit) {
    const int64_t tiles = (rows + MR - 1) / MR;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t first = rows * i / tiles;
        visit(first, (int)(rows * (i + 1) / tiles - first));
    }
}

// Rows that are computed together: their part of `x` stays in the second cache while panels pass by.
constexpr int64_t kRowBlock = 120;
// A block of logits whose maximum is kept.
constexpr int64_t kPeak = 64;

static inline int64_t columns_of(const Linear& l) {
    return l.epilogue == kGated ? (l.out_width + L - 1) / L * NR : l.out_width;
}

static inline int64_t panels_of(const Linear& l) {
    const int64_t panels = (columns_of(l) + NR - 1) / NR, each = kPeak / NR;
    return l.epilogue == kLogits ? (panels + each - 1) / each * each : panels;
}

template <class T>
static inline void finish_plain(const Linear& l, int64_t row, int rows, int64_t panel, const float* c) {
    const int64_t first = panel * NR;
    for (int r = 0; r < rows; r++) {
        T* out = (T*)l.out + (row + r) * l.out_stride + first;
        for (int half = 0; half < 2; half++) {
            vf v = load(c + r * NR + half * L);
            if (l.bias) v += load(l.bias + first + half * L);
            const int64_t left = l.out_width - first - half * L;
            if (left >= L)
                store(out + half * L, v);
            else if (left > 0)
                store_some(out + half * L, v, (int)left);
        }
    }
}

// A panel is L gate columns and the L up columns of the same places.
template <class T>
static inline void finish_gated(const Linear& l, int64_t row, int rows, int64_t panel, const float* c) {
    const int64_t left = l.out_width - panel * L;
    for (int r = 0; r < rows; r++) {
        vf gate = load(c + r * NR), up = load(c + r * NR + L);
        if (l.bias) gate += load(l.bias + panel * NR), up += load(l.bias + panel * NR + L);
        T* out = (T*)l.out + (row + r) * l.out_stride + panel * L;
        vf v = silu_v(gate) * up;
        if (left >= L)
            store(out, v);
        else
            store_some(out, v, (int)left);
    }
}

// Float32, with -inf behind the vocabulary. `most` [rows] are the block's maxima so far.
static inline void finish_logits(const Linear& l, int64_t row, int rows, int64_t panel, const float* c, vf* most) {
    for (int r = 0; r < rows; r++) {
        float* out = (float*)l.out + (row + r) * l.out_stride + panel * NR;
        for (int half = 0; half < 2; half++) {
            vf v = load(c + r * NR + half * L);
            const int64_t left = l.out_width - panel * NR - half * L;
            for (int64_t i = std::max<int64_t>(left, 0); i < L; i++) v[i] = -__builtin_inff();
            store(out + half * L, v);
            most[r] = max_or_nan(most[r], v);
        }
    }
}

// Asks for the lines that a tile's results go to, before it is computed: they are far apart.
template <class T>
static inline void bring_results(const Linear& l, int64_t row, int rows, int64_t panel) {
    if (l.epilogue == kLogits) return;
    const T* out = (const T*)l.out + row * l.out_stride + panel * (l.epilogue == kGated ? L : NR);
    for (int r = 0; r < rows; r++) __builtin_prefetch(out + r * l.out_stride, 1);
}

// A packed weight of so many panels.
struct Matrix {
    const void* packed;
    int64_t panels, in, dtype;
    bool compact;
};

// `c` = rows of `x` by one panel. Meanwhile a compact one has the piece brought near.
template <class T>
static inline void product(const Matrix& m, int64_t panel, int rows, const T* x, int64_t stride,
                           [[maybe_unused]] const Piece& piece, float* c) {
#if ROPEWAY_DPBF16
    if constexpr (sizeof(T) == 2)
        if (m.compact)
            return compact_rows(rows, x, stride, CompactPanel(m.packed, compact_sizes(m.panels, m.in), panel), piece, c);
#endif
    tile_rows<T>(rows, x, stride, (const T*)((const char*)m.packed + panel * panel_bytes(m.in, m.dtype)), m.in, c);
}

// Panels [begin, end) of the rows [first, last).
template <class T>
static void linear_block(const Linear& l, const Batch& batch, Ahead& ahead, int64_t first, int64_t last, int64_t begin,
                         int64_t end) {
    alignas(64) float c[MR * NR];
    const int64_t group = l.epilogue == kLogits ? kPeak / NR : 1;
    const Matrix matrix{l.packed, (columns_of(l) + NR - 1) / NR, l.in, l.dtype, l.compact != 0};
    Reach reach[kPeak / NR];
    for (int64_t panel = begin; panel < end; panel += group) {
        for (int64_t p = 0; l.lora && p < group; p++) {
            reach[p] = reach_of(l.lora->site, panel + p);
            prefetch_reach(*l.lora, batch, panel == begin ? reach[p] : reach_of(l.lora->site, panel + group + p));
        }
        for_tiles(last - first, [&](int64_t at, int rows) {
            const int64_t row = first + at;
            const T* x = (const T*)l.x + row * l.x_stride;
            vf most[MR];
            if (l.epilogue == kLogits)
                for (int r = 0; r < rows; r++) most[r] = splat(-__builtin_inff());
            for (int64_t p = panel; p < panel + group; p++) {
                bring_results<T>(l, row, rows, p);
                const Piece piece = matrix.compact ? ahead.next(x) : Piece::none(x);
                if (p < matrix.panels) product<T>(matrix, p, rows, x, l.x_stride, piece, c);
                if (l.lora) add_low<T>(*l.lora, batch, reach[p - panel], row, rows, c);
                if (l.epilogue == kPlain) finish_plain<T>(l, row, rows, p, c);
                if (l.epilogue == kGated) finish_gated<T>(l, row, rows, p, c);
                if (l.epilogue == kLogits) finish_logits(l, row, rows, p, c, most);
            }
            if (l.epilogue == kLogits)
                for (int r = 0; r < rows; r++) l.peaks[(row + r) * l.peaks_stride + panel * NR / kPeak] = max_lanes(most[r]);
        });
    }
}

// How a product falls into tasks.
struct LinearCut {
    int64_t row_blocks, rows_each, panel_blocks, groups, group;
    int64_t tasks() const { return row_blocks * panel_blocks; }
    int64_t panel(int64_t block) const { return groups * block / panel_blocks * group; }
};

// `group`: panels that stay together.
static inline LinearCut cut_panels(int64_t panels, int64_t group, int64_t rows, int threads) {
    LinearCut cut;
    cut.row_blocks = (rows + kRowBlock - 1) / kRowBlock;
    cut.rows_each = cut.row_blocks ? (rows + cut.row_blocks - 1) / cut.row_blocks : 1;
    cut.groups = panels / group, cut.group = group;
    // Enough tasks for nobody to wait long for the last, and few enough for the counting to cost nothing: a product of
    // one row takes some microseconds, of which sixteen counts by two threads would be a tenth.
    const int64_t each = rows <= 8 ? 2 : rows <= 64 ? 4 : 8;
    const int64_t wanted = std::max<int64_t>(1, threads * each / std::max<int64_t>(1, cut.row_blocks));
    cut.panel_blocks = std::max<int64_t>(1, std::min(cut.groups, wanted));
    // The same number for each thread, where that takes few more: nine tasks of two would be as long as ten.
    while (cut.tasks() % threads && cut.panel_blocks < std::min(cut.groups, wanted + threads - 1)) cut.panel_blocks++;
    return cut;
}

static inline LinearCut cut_linear(const Linear& l, int64_t rows, int threads) {
    return cut_panels(panels_of(l), l.epilogue == kLogits ? kPeak / NR : 1, rows, threads);
}

static inline void run_linear(const Linear& l, const Batch& batch, Ahead& ahead, int threads, int64_t task) {
    const int64_t rows = batch.rows;
    const LinearCut cut = cut_linear(l, rows, threads);
    const int64_t row_block = task / cut.panel_blocks, panel_block = task % cut.panel_blocks;
    const int64_t first = row_block * cut.rows_each, last = std::min(rows, first + cut.rows_each);
    const int64_t begin = cut.panel(panel_block), end = cut.panel(panel_block + 1);
    if (l.dtype == kBFloat16)
        linear_block<bf16>(l, batch, ahead, first, last, begin, end);
    else
        linear_block<float>(l, batch, ahead, first, last, begin, end);
}

// Weight [out, in] into panels, zeros behind the last column. Gated: the weight is gate above up, 2 * out_width rows.
template <class T>
static void pack_panels(const T* weight, int64_t out, int64_t in, bool gated, T* packed) {
    constexpr int pair = sizeof(T) == 2 ? 2 : 1;
    const int64_t width = gated ? out / 2 : out, panels = gated ? (width + L - 1) / L : (width + NR - 1) / NR;
    const size_t each = panel_bytes(in, pair == 2 ? kBFloat16 : kFloat32) / sizeof(T);
    for (int64_t p = 0; p < panels; p++) {
        T* panel = packed + p * each;
        std::memset((void*)panel, 0, each * sizeof(T));
        for (int j = 0; j < NR; j++) {
            const int64_t place = gated ? p * L + j % L : p * NR + j;
            if (place >= width) continue;
            const T* source = weight + (gated && j >= L ? width + place : place) * in;
            for (int64_t i = 0; i < in; i++) panel[(i / pair * NR + j) * pair + i % pair] = source[i];
        }
    }
}
