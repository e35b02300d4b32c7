// How a block of the KV cache lies in memory. Plainly it is [block_size][2][kv_heads][dim]. Where pairs of bfloat16 are
// multiplied by one instruction, and vectors fit, it lies as these take it: the keys of each KV head, [dim / 2][block_size][2],
// behind all of them the values of each, [block_size / 2][dim][2]. So attention reads both as they are, in long runs.
#pragma once

#include "abi.h"
#include "vec.h"

static inline bool is_paired(int64_t dtype, int64_t block_size, int64_t dim) {
    return ROPEWAY_DPBF16 && dtype == kBFloat16 && block_size % L == 0 && dim % (2 * L) == 0;
}

#if ROPEWAY_DPBF16
// Has what a row writes to brought near: its keys touch a line for each pair of elements.
static inline void bring_paired(const WriteKv& w, int64_t row) {
    const int64_t size = w.block_size, block = w.slots[row] / size, offset = w.slots[row] % size;
    const uint16_t* keys = (const uint16_t*)w.cache + block * size * 2 * w.kv_heads * w.dim;
    const uint16_t* values = keys + w.kv_heads * w.dim * size + offset / 2 * w.dim * 2;
    for (int64_t h = 0; h < w.kv_heads; h++, keys += w.dim * size, values += w.dim * size) {
        for (int64_t d = 0; d < w.dim; d += 2) __builtin_prefetch(keys + (d / 2 * size + offset) * 2, 1);
        for (int64_t d = 0; d < w.dim; d += L) __builtin_prefetch(values + d * 2, 1);
    }
}

// Writes nothing but its own elements, since a neighbour may be written meanwhile.
static inline void write_paired(const WriteKv& w, int64_t row) {
    const int64_t size = w.block_size, block = w.slots[row] / size, offset = w.slots[row] % size;
    const uint16_t* source = (const uint16_t*)((const char*)w.kv + row * w.stride);
    uint16_t* keys = (uint16_t*)w.cache + block * size * 2 * w.kv_heads * w.dim;
    uint16_t* values = keys + w.kv_heads * w.dim * size + offset / 2 * w.dim * 2;
    const __mmask32 mine = offset % 2 ? 0xaaaaaaaau : 0x55555555u;
    for (int64_t h = 0; h < w.kv_heads; h++, source += w.dim, keys += w.dim * size, values += w.dim * size) {
        for (int64_t d = 0; d < w.dim; d += 2) std::memcpy(keys + (d / 2 * size + offset) * 2, source + d, 4);
        const uint16_t* value = source + w.kv_heads * w.dim;
        for (int64_t d = 0; d < w.dim; d += L) {
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(value + d)));
            _mm512_mask_storeu_epi16(values + d * 2, mine, offset % 2 ? _mm512_slli_epi32(wide, 16) : wide);
        }
    }
}
#endif

// Rows [first, last).
static inline void run_write_kv(const WriteKv& w, int64_t first, int64_t last) {
#if ROPEWAY_DPBF16
    if (is_paired(w.dtype, w.block_size, w.dim)) {
        for (int64_t row = first; row < last; row++) bring_paired(w, row);
        for (int64_t row = first; row < last; row++) write_paired(w, row);
        return;
    }
#endif
    const int64_t bytes = 2 * w.kv_heads * w.dim * (w.dtype == kBFloat16 ? 2 : 4);
    for (int64_t row = first; row < last; row++)
        std::memcpy((char*)w.cache + w.slots[row] * bytes, (const char*)w.kv + row * w.stride, bytes);
}
