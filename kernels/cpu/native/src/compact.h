// Weights in bfloat16 in three quarters of their bytes, losslessly. Of a weight's upper byte, its sign and all of its exponent
// but one bit, few values are common: a compact panel has each weight's lower byte, and in half a byte which of the panel's
// sixteen commonest upper ones it has. Blocks with another one lie whole in a pool behind the panels. What a tile multiplies by are
// the same bits as those of a plain panel, in the same order; where reading weights takes the time, it takes three quarters of it.
#pragma once

#include "abi.h"
#include "ahead.h"
#include "vec.h"

#include <algorithm>

constexpr int64_t kBlockInputs = 4;                       // inputs of a block, all columns of its panel
constexpr int64_t kBlockBytes = NR * kBlockInputs * 2;    // in a plain panel
constexpr int64_t kCompactBytes = kBlockBytes / 4 * 3;
constexpr int64_t kPoolShare = 32;                        // of so many blocks one may lie in the pool

// At a panel's beginning.
struct CompactHeader {
    uint8_t upper[16];     // by code
    int32_t first, count;  // blocks in the pool
    int32_t unused[10];
};

struct CompactSizes {
    int64_t panels, blocks;  // blocks: of a panel
    int64_t panel() const { return (int64_t)sizeof(CompactHeader) + blocks * kCompactBytes; }
    int64_t pool() const { return (panels * blocks + kPoolShare - 1) / kPoolShare; }
    // Which blocks of their panels are in the pool; then the blocks.
    int64_t places() const { return panels * panel(); }
    int64_t whole() const { return places() + (pool() * 4 + 63) / 64 * 64; }
    int64_t bytes() const { return whole() + pool() * kBlockBytes; }
};

static inline CompactSizes compact_sizes(int64_t panels, int64_t in) {
    return {panels, in / kBlockInputs};
}

// Not where the decoding instructions are missing, nor where there is nothing to be won.
static inline bool compacts(int64_t panels, int64_t in, int64_t dtype) {
    return ROPEWAY_DPBF16 && dtype == kBFloat16 && in > 0 && in % kBlockInputs == 0 &&
           compact_sizes(panels, in).bytes() < panels * in * NR * 2;
}

#if ROPEWAY_DPBF16

// A block is a line of lower bytes for each pair of its inputs, and one of codes, those of the first pair in the lower halves
// of bytes. Two vectors of a pair's weights take turns by eighths, as `unpack` parts them.
static inline int64_t compact_place(int64_t weight) {
    const int64_t half = weight / 32, inside = weight % 32;
    return inside / 8 * 16 + half * 8 + inside % 8;
}

// The sixteen commonest upper bytes of a panel: `code` [256] has their numbers, and 16 for the others.
static inline void choose_upper(const uint16_t* panel, int64_t count, CompactHeader& header, uint8_t* code) {
    int32_t seen[4][256] = {};
    for (int64_t i = 0; i < count; i += 4)
        for (int j = 0; j < 4; j++) seen[j][panel[i + j] >> 8]++;
    int order[256];
    for (int e = 0; e < 256; e++) order[e] = e, seen[0][e] += seen[1][e] + seen[2][e] + seen[3][e];
    std::partial_sort(order, order + 16, order + 256,
                      [&](int a, int b) { return seen[0][a] != seen[0][b] ? seen[0][a] > seen[0][b] : a < b; });
    std::memset(code, 16, 256);
    for (int i = 0; i < 16; i++) code[order[i]] = (uint8_t)i, header.upper[i] = (uint8_t)order[i];
}

// One block; false where not all of its upper bytes have a code.
static inline bool compact_block(const uint16_t* block, const uint8_t* code, const uint8_t* place, uint8_t* out) {
    uint8_t all = 0;
    for (int i = 0; i < 64; i++) {
        const uint16_t first = block[i], second = block[64 + i];
        const uint8_t a = code[first >> 8], b = code[second >> 8];
        all |= a | b;
        out[place[i]] = (uint8_t)first;
        out[64 + place[i]] = (uint8_t)second;
        out[128 + place[i]] = (uint8_t)((a & 15) | b << 4);
    }
    return all < 16;
}

// From plain panels; false where too many blocks have rare upper bytes.
static inline bool compact_panels(const uint16_t* panels, const CompactSizes& sizes, char* out) {
    uint8_t place[64], code[256];
    for (int i = 0; i < 64; i++) place[i] = (uint8_t)compact_place(i);
    int32_t* places = (int32_t*)(out + sizes.places());
    char* whole = out + sizes.whole();
    std::memset((void*)places, 0, sizes.bytes() - sizes.places());
    int64_t pooled = 0;
    for (int64_t p = 0; p < sizes.panels; p++) {
        const uint16_t* panel = panels + p * sizes.blocks * (kBlockBytes / 2);
        CompactHeader header{};
        choose_upper(panel, sizes.blocks * (kBlockBytes / 2), header, code);
        header.first = (int32_t)pooled;
        uint8_t* target = (uint8_t*)out + p * sizes.panel() + sizeof header;
        for (int64_t b = 0; b < sizes.blocks; b++) {
            const uint16_t* block = panel + b * (kBlockBytes / 2);
            if (compact_block(block, code, place, target + b * kCompactBytes)) continue;
            if (pooled == sizes.pool()) return false;
            places[pooled] = (int32_t)b;
            std::memcpy(whole + pooled++ * kBlockBytes, block, kBlockBytes);
        }
        header.count = (int32_t)(pooled - header.first);
        std::memcpy(out + p * sizes.panel(), &header, sizeof header);
    }
    return true;
}

// A panel, and its blocks in the pool.
struct CompactPanel {
    CompactPanel(const void* matrix, const CompactSizes& sizes, int64_t panel) : blocks(sizes.blocks) {
        const char* base = (const char*)matrix;
        header = (const CompactHeader*)(base + panel * sizes.panel());
        places = (const int32_t*)(base + sizes.places()) + header->first;
        whole = base + sizes.whole() + header->first * kBlockBytes;
    }

    const CompactHeader* header;
    const int32_t* places;
    const char* whole;
    int64_t blocks;
};

// Whether these are compact panels: what they point to lies in the matrix, and no block is in the pool twice.
static inline bool compact_fits(const void* matrix, const CompactSizes& sizes) {
    int64_t pooled = 0;
    for (int64_t p = 0; p < sizes.panels; p++) {
        const CompactHeader& header = *(const CompactHeader*)((const char*)matrix + p * sizes.panel());
        if (header.first != pooled || header.count < 0 || header.count > sizes.pool() - pooled) return false;
        const CompactPanel panel(matrix, sizes, p);
        for (int64_t i = 0, least = 0; i < header.count; least = panel.places[i++] + 1)
            if (panel.places[i] < least || panel.places[i] >= sizes.blocks) return false;
        pooled += header.count;
    }
    return true;
}

// A panel as it was, [blocks][2][NR][2].
static inline void expand_panel(const CompactPanel& panel, bf16* out) {
    const __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)panel.header->upper));
    const __m512i half = _mm512_set1_epi8(15);
    const char* b = (const char*)(panel.header + 1);
    char* target = (char*)out;
    for (int64_t at = 0; at < panel.blocks; at++, b += kCompactBytes) {
        __m512i codes = _mm512_loadu_si512(b + 128);
        for (int pair = 0; pair < 2; pair++, target += kBlockBytes / 2, codes = _mm512_srli_epi16(codes, 4)) {
            const __m512i lower = _mm512_loadu_si512(b + 64 * pair);
            const __m512i bytes = _mm512_shuffle_epi8(upper, _mm512_and_si512(half, codes));
            _mm512_storeu_si512(target, _mm512_unpacklo_epi8(lower, bytes));
            _mm512_storeu_si512(target + 64, _mm512_unpackhi_epi8(lower, bytes));
        }
    }
    for (int32_t i = 0; i < panel.header->count; i++)
        std::memcpy((char*)out + panel.places[i] * kBlockBytes, panel.whole + i * kBlockBytes, kBlockBytes);
}

// One column of a panel.
static inline void expand_column(const CompactPanel& panel, int64_t column, bf16* out) {
    const uint8_t* b = (const uint8_t*)(panel.header + 1);
    const int64_t place[2] = {compact_place(column * 2), compact_place(column * 2 + 1)};
    for (int64_t at = 0; at < panel.blocks; at++, b += kCompactBytes)
        for (int i = 0; i < kBlockInputs; i++) {
            const int64_t pair = i / 2, own = place[i % 2];
            const int code = b[128 + own] >> 4 * pair & 15;
            out[at * kBlockInputs + i].bits = (uint16_t)(panel.header->upper[code] << 8 | b[64 * pair + own]);
        }
    for (int32_t k = 0; k < panel.header->count; k++)
        for (int i = 0; i < kBlockInputs; i++)
            std::memcpy(out + panel.places[k] * kBlockInputs + i,
                        panel.whole + k * kBlockBytes + ((i / 2) * 2 * NR + column * 2 + i % 2) * 2, 2);
}

// `tile` over a compact panel, for inputs in whole blocks: the same sums in the same order. With more than a few rows it has
// the piece brought near, two lines a block.
template <int R>
static __attribute__((noinline)) void compact_tile(const bf16* a, int64_t stride, const CompactPanel& panel, Piece piece,
                                                   float* c) {
    __m512 acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    const int64_t step = stride * 2;
    const char* base = (const char*)a;
    // As in `tile`.
    const char *p0 = base, *p1 = base + 3 * step, *p2 = base + 6 * step, *p3 = base + 9 * step;
    auto multiply = [&](__m512i b0, __m512i b1) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const char* p = r < 3 ? p0 : r < 6 ? p1 : r < 9 ? p2 : p3;
            int32_t pair;
            std::memcpy(&pair, p + (r % 3) * step, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, (__m512bh)b0);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, (__m512bh)b1);
        }
        p0 += 4, p1 += 4, p2 += 4, p3 += 4;
    };
    const __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)panel.header->upper));
    const __m512i half = _mm512_set1_epi8(15);
    auto pair = [&](__m512i lower, __m512i codes) __attribute__((always_inline)) {
        const __m512i bytes = _mm512_shuffle_epi8(upper, _mm512_and_si512(half, codes));
        multiply(_mm512_unpacklo_epi8(lower, bytes), _mm512_unpackhi_epi8(lower, bytes));
    };
    const char *b = (const char*)(panel.header + 1), *whole = panel.whole;
    const int32_t *place = panel.places, *last = place + panel.header->count;
    for (int64_t at = 0;; at++, place++, b += kCompactBytes, whole += kBlockBytes) {
        const int64_t end = place == last ? panel.blocks : *place;
        for (; at < end; at++, b += kCompactBytes) {
            if constexpr (R > 4)
                for (int line = 0; line < kCompactBytes; line += 64) _mm_prefetch(b + 9216 + line, _MM_HINT_T1);
            const __m512i codes = _mm512_loadu_si512(b + 128);
            if constexpr (R > 4) piece.bring(), piece.bring();
            pair(_mm512_loadu_si512(b), codes);
            pair(_mm512_loadu_si512(b + 64), _mm512_srli_epi16(codes, 4));
        }
        if (at == panel.blocks) break;
        multiply(_mm512_loadu_si512(whole), _mm512_loadu_si512(whole + 64));
        multiply(_mm512_loadu_si512(whole + 128), _mm512_loadu_si512(whole + 192));
    }
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(c + r * NR, acc[r][0]);
        _mm512_storeu_ps(c + r * NR + L, acc[r][1]);
    }
}

static inline void compact_rows(int rows, const bf16* a, int64_t stride, const CompactPanel& panel, const Piece& piece,
                                float* c) {
    using Function = void (*)(const bf16*, int64_t, const CompactPanel&, Piece, float*);
    static const Function functions[MR] = {compact_tile<1>, compact_tile<2>,  compact_tile<3>,  compact_tile<4>,
                                           compact_tile<5>, compact_tile<6>,  compact_tile<7>,  compact_tile<8>,
                                           compact_tile<9>, compact_tile<10>, compact_tile<11>, compact_tile<12>};
    functions[rows - 1](a, stride, panel, piece, c);
}

#endif  // ROPEWAY_DPBF16
