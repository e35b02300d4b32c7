// Causal attention over block tables: some query rows of one KV head against tiles of keys, with a running softmax.
// Tiles are counted from a sequence's first key, and a key that a row does not see weighs exactly zero in it: so a
// row's result depends on its own query and keys alone, in a decode as in a prompt's chunk.
#pragma once

#include "gemm.h"

#include <vector>

constexpr int kKeys = 64;  // of a tile
constexpr int kQueryRows = 48;

// Query tokens [first, first + count) of a sequence, all heads of a KV head.
struct QueryTile {
    int64_t sequence, row, count, visible;  // `visible`: keys that the first of them sees
};

// Space that a thread keeps.
struct Scratch {
    std::vector<char> space;
    char* take(size_t bytes) {
        if (space.size() < bytes + 64) space.resize(bytes + 64);
        return (char*)(((uintptr_t)space.data() + 63) & ~(uintptr_t)63);
    }
};

static inline int64_t query_tokens(const Attention& a) {
    return std::max<int64_t>(1, kQueryRows / (a.heads / a.kv_heads));
}

static inline void cut_queries(const Batch& batch, int64_t each, std::vector<QueryTile>& tiles) {
    tiles.clear();
    int64_t row = 0;
    for (int64_t s = 0; s < batch.sequences; s++) {
        const int64_t count = batch.counts[s], before = batch.lengths[s] - count;
        for (int64_t at = 0; at < count; at += each)
            tiles.push_back({s, row + at, std::min(each, count - at), before + at + 1});
        row += count;
    }
}

#if ROPEWAY_DPBF16
// 16 rows of 16 dwords, turned about.
static inline void transpose16(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}
#endif

// Keys as the columns of a panel, as `tile` takes them; zeros for keys from `count` on.
template <class T>
static inline void pack_keys(const T* const* keys, int count, int64_t dim, T* panel) {
    constexpr int pair = sizeof(T) == 2 ? 2 : 1;
#if ROPEWAY_DPBF16
    if (pair == 2 && dim % 32 == 0) {
        for (int64_t d = 0; d < dim; d += 32)
            for (int half = 0; half < 2; half++) {
                __m512i rows[16];
                for (int j = 0; j < 16; j++)
                    rows[j] = half * 16 + j < count ? _mm512_loadu_si512(keys[half * 16 + j] + d) : _mm512_setzero_si512();
                transpose16(rows);
                for (int j = 0; j < 16; j++) _mm512_storeu_si512(panel + ((d / 2 + j) * NR + half * 16) * 2, rows[j]);
            }
        return;
    }
#endif
    for (int j = 0; j < NR; j++)
        for (int64_t d = 0; d < dim; d++) panel[(d / pair * NR + j) * pair + d % pair] = j < count ? keys[j][d] : T{};
}

template <class T>
struct AttentionTask {
    const Attention& a;
    const Batch& batch;
    const QueryTile& tile_of;
    int64_t kv_head, per_head, rows, panels;
    T *query, *panel;
    float *value, *score, *mixed, *total, *out, *top;

    AttentionTask(const Attention& attention, const Batch& b, const QueryTile& t, int64_t head, Scratch& scratch)
        : a(attention), batch(b), tile_of(t), kv_head(head), per_head(a.heads / a.kv_heads), rows(t.count * per_head) {
        panels = (a.dim + NR - 1) / NR;
        const size_t wide = panels * NR;
        const size_t floats = kKeys * wide + rows * kKeys + MR * NR + rows * wide + 2 * rows;
        const size_t halves = rows * a.dim + 2 * NR + NR * a.dim;
        char* space = scratch.take(floats * 4 + (halves + 64) * sizeof(T) + 256);
        value = (float*)space;
        score = value + kKeys * wide;
        mixed = score + rows * kKeys;
        out = mixed + MR * NR;
        total = out + rows * wide;
        top = total + rows;
        query = (T*)(top + rows);
        panel = query + rows * a.dim;
    }

    const T* key_at(int64_t position) const {
        const int64_t block = batch.blocks[batch.starts[tile_of.sequence] + position / a.block_size];
        const int64_t slot = block * a.block_size + position % a.block_size;
        return (const T*)a.cache + (slot * 2 * a.kv_heads + kv_head) * a.dim;
    }

    void run() {
        for (int64_t r = 0; r < rows; r++) {
            const int64_t token = tile_of.row + r / per_head, head = kv_head * per_head + r % per_head;
            std::memcpy((void*)(query + r * a.dim), (const T*)a.query + token * a.query_stride + head * a.dim,
                        a.dim * sizeof(T));
            total[r] = 0.0f, top[r] = -__builtin_inff();
        }
        std::memset(out, 0, rows * panels * NR * sizeof(float));
        const int64_t keys = tile_of.visible + tile_of.count - 1;
        for (int64_t first = 0; first < keys; first += kKeys) step(first, (int)std::min<int64_t>(kKeys, keys - first));
        for (int64_t r = 0; r < rows; r++) {
            const int64_t token = tile_of.row + r / per_head, head = kv_head * per_head + r % per_head;
            T* result = (T*)a.out + token * a.out_stride + head * a.dim;
            const float scale = 1.0f / total[r];
            for (int64_t d = 0; d < a.dim; d += L) {
                vf v = load(out + r * panels * NR + d) * scale;
                if (d + L <= a.dim)
                    store(result + d, v);
                else
                    store_some(result + d, v, (int)(a.dim - d));
            }
        }
    }

    // `count` keys from `first` on.
    void step(int64_t first, int count) {
        const T* keys[kKeys];
        for (int j = 0; j < count; j++) keys[j] = key_at(first + j);
        for (int j = 0; j < count; j += NR) {
            pack_keys(keys + j, std::min(NR, count - j), a.dim, panel);
            for_tiles(rows, [&](int64_t r, int n) {
                tile_rows<T>(n, query + r * a.dim, a.dim, panel, a.dim, mixed);
                for (int i = 0; i < n; i++) std::memcpy(score + (r + i) * kKeys + j, mixed + i * NR, NR * sizeof(float));
            });
        }
        const int used = (count + NR - 1) / NR * NR;
        float shrink[kQueryRows];
        for (int64_t r = 0; r < rows; r += kQueryRows) {
            const int64_t some = std::min<int64_t>(kQueryRows, rows - r);
            for (int64_t i = 0; i < some; i++)
                shrink[i] = soften(r + i, tile_of.visible + (r + i) / per_head - first, used);
            if (r == 0) widen_values(keys, count);
            mix(r, some, count, shrink);
        }
    }

    // Scores of a row into weights; what its earlier sums shrink by.
    float soften(int64_t r, int64_t visible, int used) {
        float* s = score + r * kKeys;
        for (int j = (int)std::max<int64_t>(0, visible); j < used; j++) s[j] = -__builtin_inff();
        vf most = splat(-__builtin_inff());
        for (int j = 0; j < used; j += L) {
            vf v = load(s + j) * (float)a.scale;
            store(s + j, v);
            most = v > most ? v : most;
        }
        const float highest = std::max(top[r], max_lanes(most));
        vf sum = {};
        for (int j = 0; j < used; j += L) {
            vf v = load(s + j);
            vf weight = v == -__builtin_inff() ? vf{} : exp_v(v - highest);
            store(s + j, weight);
            sum += weight;
        }
        const float shrink = highest == top[r] ? 1.0f : exp_v(splat(top[r] - highest))[0];
        top[r] = highest;
        total[r] = total[r] * shrink + sum_lanes(sum);
        return shrink;
    }

    // Values of a tile as float32 panels.
    void widen_values(const T* const* keys, int count) {
        for (int64_t p = 0; p < panels; p++)
            for (int j = 0; j < count; j++) {
                const T* source = keys[j] + a.kv_heads * a.dim + p * NR;
                float* target = value + (p * kKeys + j) * NR;
                const int64_t left = a.dim - p * NR;
                if (left >= NR) {
                    store(target, load(source));
                    store(target + L, load(source + L));
                } else {
                    store(target, left >= L ? load(source) : load_some(source, (int)left));
                    store(target + L, left > L ? load_some(source + L, (int)(left - L)) : vf{});
                }
            }
    }

    void mix(int64_t r, int64_t some, int count, const float* shrink) {
        for (int64_t p = 0; p < panels; p++)
            for_tiles(some, [&](int64_t at, int n) {
                tile_rows<float>(n, score + (r + at) * kKeys, kKeys, value + p * kKeys * NR, count, mixed);
                for (int i = 0; i < n; i++) {
                    float* o = out + (r + at + i) * panels * NR + p * NR;
                    const float s = shrink[at + i];
                    store(o, load(o) * s + load(mixed + i * NR));
                    store(o + L, load(o + L) * s + load(mixed + i * NR + L));
                }
            });
    }
};

static inline void run_attention(const Attention& a, const Batch& batch, const std::vector<QueryTile>& tiles,
                                 int64_t task, Scratch& scratch) {
    const QueryTile& tile_of = tiles[task / a.kv_heads];
    const int64_t kv_head = task % a.kv_heads;
    if (a.dtype == kBFloat16)
        AttentionTask<bf16>(a, batch, tile_of, kv_head, scratch).run();
    else
        AttentionTask<float>(a, batch, tile_of, kv_head, scratch).run();
}
