// The arg-max of an output matrix's products without all of them: an 8-bit copy of the matrix says, with proven bounds,
// which columns can hold a row's maximum; these alone are computed, as `tile` always does.
//
// For a row h and a column w with 8-bit forms h' and w', the Cauchy-Schwarz inequality gives
//     |h.w - h'.w'| <= |h| |w - w'| + |h - h'| |w'|.
// Both differences' norms are known exactly enough. Rounding of sums in float32 is in the bounds too (`kSlack`, `margin`).
#pragma once

#include "gemm.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

// A quadruple of bytes of rows and columns is multiplied and added by one instruction.
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define ROPEWAY_SCREEN 1
#else
#define ROPEWAY_SCREEN 0
#endif

// Sums of products of bytes stay far from the ends of 32 bits.
constexpr int64_t kMostScreened = 32768;
// Norms of rows and columns that are screened. Together with `kSlack` this leaves room for flushed denormals.
constexpr double kLargestNorm = 1e9;
constexpr float kSlack = 1e-20f;

static inline int64_t quads_of(int64_t in) {
    return (in + 3) / 4;
}

static inline size_t coarse_panel_bytes(int64_t in) {
    return (size_t)NR * 4 * quads_of(in);
}

// What a panel's columns are: scales of their bytes, norms of their 8-bit forms, norms of what these leave out.
constexpr int64_t kPanelBounds = 3 * NR;

#if ROPEWAY_SCREEN

// L columns of an input's place in a packed panel.
static inline vf panel_place(const float* panel, int64_t i, int half) {
    return load(panel + i * NR + half * L);
}

static inline vf panel_place(const bf16* panel, int64_t i, int half) {
    vu pairs;
    std::memcpy(&pairs, panel + (i / 2 * NR + half * L) * 2, sizeof pairs);
    return (vf)(i % 2 ? pairs & 0xffff0000u : pairs << 16);
}

typedef int8_t vb __attribute__((vector_size(L)));

static inline vf abs_v(vf x) {
    return (vf)((vu)x & 0x7fffffffu);
}

static inline vf sqrt_v(vf x) {
    for (int i = 0; i < L; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
}

// The nearest integer from -127 to 127; 0 for a NaN.
static inline vf rounded_byte(vf x) {
    x = x > 127.0f ? splat(127.0f) : x;
    x = x < -127.0f ? splat(-127.0f) : x;
    x = (x + 12582912.0f) - 12582912.0f;  // as in `exp_v`
    return x == x ? x : vf{};
}

// Half a panel into bytes, [quads][NR][4], offset by 128; false where a column is too large or not finite.
template <class T>
static bool screen_half(const T* panel, int64_t in, int half, uint8_t* coarse, float* bounds) {
    vf most = {}, norm = {}, rest = {};
    for (int64_t i = 0; i < in; i++) most = max_or_nan(most, abs_v(panel_place(panel, i, half)));
    // What is that small goes to zero, and is left out.
    const vf scale = most < 1e-30f ? vf{} : most * (1.0f / 127.0f);
    const vf inverse = most < 1e-30f ? vf{} : 1.0f / scale;
    for (int64_t quad = 0; quad < quads_of(in); quad++) {
        vu bytes = {};
        for (int j = 0; j < 4; j++) {
            const int64_t i = quad * 4 + j;
            const vf w = i < in ? panel_place(panel, i, half) : vf{};
            const vf q = rounded_byte(w * inverse), form = q * scale;
            norm += form * form, rest += (w - form) * (w - form);
            bytes |= (vu)(__builtin_convertvector(q, vi) + 128) << (8 * j);
        }
        std::memcpy(coarse + (quad * NR + half * L) * 4, &bytes, sizeof bytes);
    }
    // Sums of so many squares, and products that underflow.
    const float grown = 1.0f + (float)(in + 8) * 0x1p-22f;
    const vf form_norm = sqrt_v(norm) * grown + 1e-16f;
    const vf rest_norm = sqrt_v(rest) * grown + form_norm * 0x1p-22f + 1e-16f;
    bool fine = true;
    for (int j = 0; j < L; j++) fine = fine && form_norm[j] + rest_norm[j] < (float)kLargestNorm;
    store(bounds + half * L, scale);
    store(bounds + NR + half * L, form_norm);
    store(bounds + 2 * NR + half * L, rest_norm);
    return fine;
}

// A panel of the matrix as `tile` takes it, in `space` if it has to be made.
template <class T>
static const T* plain_panel(const Matrix& m, int64_t panel, [[maybe_unused]] std::vector<T>& space) {
#if ROPEWAY_DPBF16
    if constexpr (sizeof(T) == 2)
        if (m.compact) {
            space.resize(panel_bytes(m.in, m.dtype) / sizeof(T));
            expand_panel(CompactPanel(m.packed, compact_sizes(m.panels, m.in), panel), space.data());
            return space.data();
        }
#endif
    return (const T*)((const char*)m.packed + panel * panel_bytes(m.in, m.dtype));
}

template <class T>
static bool screen_panels(const Matrix& m, int64_t out, uint8_t* coarse, float* bounds) {
    const int64_t in = m.in;
    bool fine = true;
    std::vector<T> space;
    for (int64_t p = 0; p < m.panels; p++) {
        const T* panel = plain_panel<T>(m, p, space);
        float* own = bounds + p * kPanelBounds;
        for (int half = 0; half < 2; half++)
            fine = screen_half(panel, in, half, coarse + p * coarse_panel_bytes(in), own) && fine;
        // Columns that do not exist are above no floor.
        for (int64_t j = std::max<int64_t>(0, out - p * NR); j < NR; j++) own[2 * NR + j] = __builtin_nanf("");
    }
    return fine;
}

// Columns that may hold a row's maximum, of one thread.
struct Candidates {
    static constexpr int kMost = 256;
    int count = 0;
    float lost = -std::numeric_limits<float>::infinity();  // no logit that is not kept, and could be, is above this
    float above[kMost];  // no logit is above this
    int32_t column[kMost];
};

// Of so many quadruples one has two bytes for each element.
constexpr int64_t kHighShare = 16;

// A row in 8 bits: h' = scale * (low + 127 * high), where `high` is of a few quadruples with its largest elements.
struct ScreenedRow {
    struct High {
        int32_t place, bytes;
    };
    int8_t* low;                 // [quads][4], and zeros
    std::vector<High> high;
    float scale, whole, left;    // whole: |h|; left: |h - h'|; both with what rounding may add
    int32_t low_offset, high_offset;
    std::atomic<float> floor;    // a logit that some column has at least
    std::atomic<bool> failed;    // all logits are needed

    // Nothing is above the floor then.
    void fail() {
        scale = whole = left = 0.0f;
        failed.store(true, std::memory_order_relaxed);
        raise(std::numeric_limits<float>::infinity());
    }

    void raise(float to) {
        float now = floor.load(std::memory_order_relaxed);
        while (to > now && !floor.compare_exchange_weak(now, to, std::memory_order_relaxed)) {
        }
    }
};

// What the stages hand on.
struct ScreenSpace {
    ScreenSpace(int64_t rows, int64_t in, int threads)
        : threads(threads), stride((in + L - 1) / L * L), bytes(new int8_t[rows * stride]), rows(new ScreenedRow[rows]),
          found(new Candidates[rows * threads]) {
        for (int64_t r = 0; r < rows; r++) this->rows[r].low = bytes.get() + r * stride;
    }

    int threads;
    int64_t stride;
    std::unique_ptr<int8_t[]> bytes;
    std::unique_ptr<ScreenedRow[]> rows;
    std::unique_ptr<Candidates[]> found;  // [rows][threads]
};

// Splits off the high bytes of a few quadruples, those with the largest elements: else a few outliers would
// make the steps of all others coarse. Returns the scale.
static float split_high(float* value, const float* size, int64_t quads, float top, ScreenedRow& row) {
    std::vector<float> most(quads);
    for (int64_t q = 0; q < quads; q++)
        most[q] = std::max(std::max(size[q * 4], size[q * 4 + 1]), std::max(size[q * 4 + 2], size[q * 4 + 3]));
    std::vector<float> sorted = most;
    std::nth_element(sorted.begin(), sorted.begin() + quads / kHighShare, sorted.end(), std::greater<float>());
    const float bulk = sorted[quads / kHighShare];
    const float scale = std::max(bulk / 127.0f, top / (126.0f * 127.0f)), step = 127.0f * scale, inverse = 1.0f / step;
    for (int64_t q = 0; q < quads; q++) {
        if (most[q] <= bulk) continue;
        int8_t bytes[4];
        for (int j = 0; j < 4; j++) {
            const float high = __builtin_nearbyintf(value[q * 4 + j] * inverse);
            value[q * 4 + j] -= high * step;
            bytes[j] = (int8_t)high;
            row.high_offset -= 128 * (int)high;
        }
        row.high.push_back({(int32_t)q, 0});
        std::memcpy(&row.high.back().bytes, bytes, 4);
    }
    return scale;
}

template <class T>
static void screen_row(const T* x, int64_t in, ScreenedRow& row, std::vector<float>& space) {
    const int64_t width = (in + L - 1) / L * L;
    row.high.clear();
    row.low_offset = row.high_offset = 0;
    std::memset(row.low, 0, width);
    row.floor.store(-std::numeric_limits<float>::infinity(), std::memory_order_relaxed);
    row.failed.store(false, std::memory_order_relaxed);
    space.resize(2 * width);
    float *value = space.data(), *size = value + width;
    vf squares = {}, top = {}, left = {};
    for (int64_t i = 0; i < in; i += L) {
        const vf v = i + L <= in ? load(x + i) : load_some(x + i, (int)(in - i));
        store(value + i, v);
        store(size + i, abs_v(v));
        squares += v * v;
        top = max_or_nan(top, abs_v(v));
    }
    const float square = sum_lanes(squares), most = max_lanes(top);
    if (!(square < kLargestNorm * kLargestNorm) || most < 1e-10f) return row.fail();
    const float scale = split_high(value, size, quads_of(in), most, row), inverse = 1.0f / scale;
    for (int64_t i = 0; i < width; i += L) {
        const vf v = load(value + i), low = rounded_byte(v * inverse), rest = v - low * scale;
        left += rest * rest;
        const vi whole = __builtin_convertvector(low, vi);
        for (int j = 0; j < L; j++) row.low_offset -= 128 * whole[j];
        const vb bytes = __builtin_convertvector(whole, vb);
        std::memcpy(row.low + i, &bytes, sizeof bytes);
    }
    // The logits' own sums in float32 have a relative error of at most in * 2^-23 of |h| |w|, and these bounds' few.
    const float margin = (float)(in + 64) * 0x1p-22f, whole = __builtin_sqrtf(square) * (1.0f + margin);
    row.scale = scale;
    row.whole = whole * (1.0f + margin);
    row.left = __builtin_sqrtf(sum_lanes(left)) * (1.0f + margin) + whole * margin;
}

static inline void run_screen_row(const Screen& s, int64_t r, ScreenSpace& space) {
    static thread_local std::vector<float> scratch;
    if (s.dtype == kBFloat16)
        screen_row<bf16>((const bf16*)s.x + r * s.x_stride, s.in, space.rows[r], scratch);
    else
        screen_row<float>((const float*)s.x + r * s.x_stride, s.in, space.rows[r], scratch);
}

// `c` [R][NR] = the rows' low bytes times the panel's, without their offsets.
template <int R>
static __attribute__((noinline)) void screen_tile(const int8_t* rows, int64_t stride, const uint8_t* panel,
                                                  int64_t quads, int32_t* c) {
    __m512i acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
    const int8_t *p0 = rows, *p1 = rows + 3 * stride, *p2 = rows + 6 * stride, *p3 = rows + 9 * stride;
    for (int64_t i = quads; i > 0; i--) {
        bring_ahead<R>((const char*)panel);
        const __m512i b0 = _mm512_loadu_si512(panel), b1 = _mm512_loadu_si512(panel + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const int8_t* p = r < 3 ? p0 : r < 6 ? p1 : r < 9 ? p2 : p3;
            int32_t quad;
            std::memcpy(&quad, p + (r % 3) * stride, 4);
            const __m512i x = _mm512_set1_epi32(quad);
            acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], b0, x);
            acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], b1, x);
        }
        p0 += 4, p1 += 4, p2 += 4, p3 += 4, panel += 128;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        _mm512_storeu_si512(c + r * NR, acc[r][0]);
        _mm512_storeu_si512(c + r * NR + L, acc[r][1]);
    }
}

static inline void screen_rows(int rows, const int8_t* first, int64_t stride, const uint8_t* panel, int64_t quads,
                               int32_t* c) {
    using Function = void (*)(const int8_t*, int64_t, const uint8_t*, int64_t, int32_t*);
    static const Function functions[MR] = {screen_tile<1>, screen_tile<2>,  screen_tile<3>,  screen_tile<4>,
                                           screen_tile<5>, screen_tile<6>,  screen_tile<7>,  screen_tile<8>,
                                           screen_tile<9>, screen_tile<10>, screen_tile<11>, screen_tile<12>};
    functions[rows - 1](first, stride, panel, quads, c);
}

// Drops what the floor has passed, and the least of the others if these are many.
static __attribute__((noinline)) void make_room(Candidates& found, float floor) {
    auto keep_from = [&](float least) {
        int kept = 0;
        for (int i = 0; i < found.count; i++)
            if (found.above[i] >= least) found.above[kept] = found.above[i], found.column[kept++] = found.column[i];
        found.count = kept;
    };
    keep_from(floor);
    if (found.count <= Candidates::kMost / 2) return;
    float sorted[Candidates::kMost];
    std::copy(found.above, found.above + found.count, sorted);
    float* middle = sorted + Candidates::kMost / 4;
    std::nth_element(sorted, middle, sorted + found.count, std::greater<float>());
    found.lost = std::max(found.lost, *middle);
    keep_from(std::nextafter(*middle, std::numeric_limits<float>::infinity()));
}

// Keeps the columns whose logits may be above the floor, which the others raise.
static __attribute__((noinline)) void keep(ScreenedRow& row, Candidates& found, __m512 form, __m512 bound,
                                           __mmask16 mask, int32_t first) {
    row.raise(_mm512_mask_reduce_max_ps(mask, _mm512_sub_ps(form, bound)));
    const float floor = row.floor.load(std::memory_order_relaxed);
    const __m512 above = _mm512_add_ps(form, bound);
    mask &= _mm512_cmp_ps_mask(above, _mm512_set1_ps(floor), _CMP_GE_OQ);
    if (found.count + L > Candidates::kMost) make_room(found, floor);
    const __m512i columns = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7,
                                                                                       6, 5, 4, 3, 2, 1, 0));
    _mm512_storeu_ps(found.above + found.count, _mm512_maskz_compress_ps(mask, above));
    _mm512_storeu_si512(found.column + found.count, _mm512_maskz_compress_epi32(mask, columns));
    found.count += __builtin_popcount(mask);
}

// A row and a panel: `c` [NR] are the products of low bytes.
static inline void screen_columns(ScreenedRow& row, Candidates& found, const uint8_t* panel, const float* bounds,
                                  const int32_t* c, int32_t first) {
    const __m512i offset = _mm512_set1_epi32(row.high_offset);
    __m512i high[2] = {offset, offset};
    for (const ScreenedRow::High& each : row.high) {
        const __m512i x = _mm512_set1_epi32(each.bytes);
        high[0] = _mm512_dpbusd_epi32(high[0], _mm512_loadu_si512(panel + each.place * 128), x);
        high[1] = _mm512_dpbusd_epi32(high[1], _mm512_loadu_si512(panel + each.place * 128 + 64), x);
    }
    for (int half = 0; half < 2; half++, bounds += L, c += L, first += L) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_loadu_si512(c), _mm512_set1_epi32(row.low_offset)));
        const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[half]), _mm512_set1_ps(127.0f), low);
        const __m512 form = _mm512_mul_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(bounds), _mm512_set1_ps(row.scale)));
        __m512 bound = _mm512_fmadd_ps(_mm512_loadu_ps(bounds + NR), _mm512_set1_ps(row.left), _mm512_set1_ps(kSlack));
        bound = _mm512_fmadd_ps(_mm512_loadu_ps(bounds + 2 * NR), _mm512_set1_ps(row.whole), bound);
        const __m512 floor = _mm512_set1_ps(row.floor.load(std::memory_order_relaxed));
        const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_add_ps(form, bound), floor, _CMP_GE_OQ);
        if (__builtin_expect(mask != 0, 0)) keep(row, found, form, bound, mask, first);
    }
}

static inline LinearCut cut_screen(const Screen& s, int64_t rows, int threads) {
    return cut_panels((s.vocab + NR - 1) / NR, 1, rows, threads);
}

static inline void run_screen_columns(const Screen& s, int64_t rows, int64_t task, int thread, ScreenSpace& space) {
    const LinearCut cut = cut_screen(s, rows, space.threads);
    const int64_t first = task / cut.panel_blocks * cut.rows_each, last = std::min(rows, first + cut.rows_each);
    const int64_t begin = cut.panel(task % cut.panel_blocks), end = cut.panel(task % cut.panel_blocks + 1);
    const int64_t quads = quads_of(s.in);
    alignas(64) int32_t c[MR * NR];
    for (int64_t p = begin; p < end; p++) {
        const uint8_t* panel = s.coarse + p * coarse_panel_bytes(s.in);
        for_tiles(last - first, [&](int64_t at, int count) {
            const int64_t row = first + at;
            screen_rows(count, space.bytes.get() + row * space.stride, space.stride, panel, quads, c);
            for (int r = 0; r < count; r++)
                screen_columns(space.rows[row + r], space.found[(row + r) * space.threads + thread], panel,
                               s.bounds + p * kPanelBounds, c + r * NR, (int32_t)(p * NR));
        });
    }
}

// The first of the columns with the greatest logit, from exact products of panels that can have it.
template <class T>
static int64_t pick_column(const Screen& s, const T* x, const ScreenedRow& row, Candidates* found, int threads) {
    const float floor = row.floor.load(std::memory_order_relaxed);
    float best = -std::numeric_limits<float>::infinity();
    int64_t column = -1;
    alignas(64) float c[NR];
    const Matrix matrix{s.packed, (s.vocab + NR - 1) / NR, s.in, s.dtype, s.compact != 0};
    for (;;) {
        float above = -std::numeric_limits<float>::infinity();
        int64_t panel = -1;
        for (int t = 0; t < threads; t++)
            for (int i = 0; i < found[t].count; i++)
                if (found[t].above[i] > above) above = found[t].above[i], panel = found[t].column[i] / NR;
        // What is no more than the best could still be equal to it.
        if (panel < 0 || above < floor || above < best) break;
        product<T>(matrix, panel, 1, x, s.x_stride, Piece::none(x), c);
        for (int64_t j = 0; j < std::min<int64_t>(NR, s.vocab - panel * NR); j++)
            if (c[j] > best || (c[j] == best && panel * NR + j < column)) best = c[j], column = panel * NR + j;
        for (int t = 0; t < threads; t++)
            for (int i = 0; i < found[t].count; i++)
                if (found[t].column[i] / NR == panel) found[t].above[i] = -std::numeric_limits<float>::infinity();
    }
    for (int t = 0; t < threads; t++)
        if (found[t].lost >= best) return -1;
    return column;
}

static inline void run_screen_pick(const Screen& s, int64_t r, ScreenSpace& space) {
    const ScreenedRow& row = space.rows[r];
    Candidates* found = space.found.get() + r * space.threads;
    if (row.failed.load(std::memory_order_relaxed))
        s.out[r] = -1;
    else if (s.dtype == kBFloat16)
        s.out[r] = pick_column<bf16>(s, (const bf16*)s.x + r * s.x_stride, row, found, space.threads);
    else
        s.out[r] = pick_column<float>(s, (const float*)s.x + r * s.x_stride, row, found, space.threads);
}

#endif  // ROPEWAY_SCREEN
