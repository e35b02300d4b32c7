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

// Has `width` elements brought near.
template <class T>
static inline void bring(const T* p, int64_t width) {
    for (int64_t at = 0; at < width * (int64_t)sizeof(T); at += 64) __builtin_prefetch((const char*)p + at, 0, 2);
}

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

// `c` [R][V * L] = p [R, keys] @ values, straight from the cache; sums as `tile` does.
template <class T, int R, int V>
static __attribute__((noinline)) void mix_tile(const float* p, int64_t stride, const T* const* keys,
                                               const T* const* next, int64_t behind, int count, float* c) {
    vf acc[R][V] = {};
    for (int j = 0; j < count; j++) {
        const T* value = keys[j] + behind;
        bring(next[j] + behind, V * L);
        vf v[V];
        for (int i = 0; i < V; i++) v[i] = load(value + i * L);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vf weight = splat(p[r * stride + j]);
            for (int i = 0; i < V; i++) acc[r][i] += weight * v[i];
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < V; i++) store(c + (r * V + i) * L, acc[r][i]);
}

// What weights and values are multiplied as.
#if ROPEWAY_DPBF16
template <class T>
using Weight = T;
#else
template <class T>
using Weight = float;
#endif

constexpr int kFewRows = 4;  // up to here values are worth no copy in float32
constexpr int kWide = 4;     // vectors of a row that `mix_few` takes at once

template <class T>
static inline void mix_few(int rows, const float* p, int64_t stride, const T* const* keys, const T* const* next,
                           int64_t behind, int count, float* c) {
    using Function = void (*)(const float*, int64_t, const T* const*, const T* const*, int64_t, int, float*);
    static const Function functions[kFewRows] = {mix_tile<T, 1, kWide>, mix_tile<T, 2, kWide>, mix_tile<T, 3, kWide>,
                                                 mix_tile<T, 4, kWide>};
    functions[rows - 1](p, stride, keys, next, behind, count, c);
}

// The query rows of one KV head, and their sums so far.
template <class T>
struct HeadState {
    T* query;                    // [rows][dim]
    float *out, *total, *top;    // [rows][width], [rows], [rows]
};

static inline int64_t head_column(const Attention& a, int64_t kv_head, int64_t r) {
    const int64_t group = a.heads / a.kv_heads;
    return (kv_head * group + r % group) * a.dim;
}

// The tile's rows of a KV head, side by side.
template <class T>
static inline void copy_queries(const Attention& a, const QueryTile& tile, int64_t kv_head, T* query) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t r = 0; r < tile.count * group; r++) {
        const T* source = (const T*)a.query + (tile.row + r / group) * a.query_stride + head_column(a, kv_head, r);
        std::memcpy((void*)(query + r * a.dim), source, a.dim * sizeof(T));
    }
}

template <class T>
static inline void clear(const HeadState<T>& s, int64_t rows, int64_t width) {
    std::fill(s.total, s.total + rows, 0.0f);
    std::fill(s.top, s.top + rows, -__builtin_inff());
    std::memset(s.out, 0, rows * width * sizeof(float));
}

template <class T>
static inline void write_results(const Attention& a, const QueryTile& tile, int64_t kv_head, const HeadState<T>& s,
                                 int64_t width) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t r = 0; r < tile.count * group; r++) {
        T* result = (T*)a.out + (tile.row + r / group) * a.out_stride + head_column(a, kv_head, r);
        const float scale = 1.0f / s.total[r];
        for (int64_t d = 0; d < a.dim; d += L) {
            const vf v = load(s.out + r * width + d) * scale;
            if (d + L <= a.dim)
                store(result + d, v);
            else
                store_some(result + d, v, (int)(a.dim - d));
        }
    }
}

// Scores of a row into weights, whose sum is of what is stored; returns what the row's earlier sums shrink by.
template <class W>
static inline float soften(float* score, int64_t visible, int used, float scale, float& top, float& total, W* weights) {
    for (int j = (int)std::max<int64_t>(0, visible); j < used; j++) score[j] = -__builtin_inff();
    vf most = splat(-__builtin_inff());
    for (int j = 0; j < used; j += L) {
        const vf v = load(score + j) * scale;
        store(score + j, v);
        most = v > most ? v : most;
    }
    const float highest = std::max(top, max_lanes(most));
    vf sum = {};
    for (int j = 0; j < used; j += L) {
        const vf v = load(score + j);
        store(weights + j, v == -__builtin_inff() ? vf{} : exp_v(v - highest));
        sum += load(weights + j);
    }
    const float shrink = highest == top ? 1.0f : exp_v(splat(top - highest))[0];
    top = highest;
    total = total * shrink + sum_lanes(sum);
    return shrink;
}

// A query tile and some KV heads: their keys lie side by side in the cache, so they go through it together.
template <class T>
class AttentionTask {
   public:
    AttentionTask(const Attention& attention, const Batch& batch, const QueryTile& tile, int64_t first_head,
                  int64_t heads, Scratch& scratch)
        : a(attention), batch_(batch), tile_(tile), first_head_(first_head), heads_(heads),
          group_(a.heads / a.kv_heads), rows_(tile.count * group_), panels_((a.dim + NR - 1) / NR),
          width_(panels_ * NR), few_(!kPairs && rows_ <= kFewRows && a.dim % (kWide * L) == 0) {
        const int64_t floats = rows_ * kKeys + MR * 2 * NR + heads * rows_ * (width_ + 2);
        const int64_t narrow = heads * rows_ * a.dim + 2 * NR + NR * a.dim;
        const int64_t weights = kKeys * width_ + rows_ * kKeys;
        value_ = (W*)scratch.take(weights * sizeof(W) + floats * sizeof(float) + narrow * sizeof(T) + 64);
        score_ = (float*)(value_ + kKeys * width_);
        mixed_ = score_ + rows_ * kKeys;
        states_ = mixed_ + MR * 2 * NR;
        weights_ = (W*)(states_ + heads * rows_ * (width_ + 2));
        panel_ = (T*)(weights_ + rows_ * kKeys);
        queries_ = panel_ + 2 * NR + NR * a.dim;
    }

    // `after`: what the same thread goes on with, or null.
    void run(const QueryTile* after, int64_t after_head) {
        for (int64_t h = 0; h < heads_; h++) begin(h);
        const int64_t keys = tile_.visible + tile_.count - 1;
        const T* found[2][kKeys];
        find(tile_, first_head_, 0, found[0]);
        for (int64_t first = 0; first < keys; first += kKeys) {
            const T **now = found[first / kKeys % 2], **next = found[(first / kKeys + 1) % 2];
            if (first + kKeys < keys)
                find(tile_, first_head_, first + kKeys, next);
            else if (after)
                find(*after, after_head, 0, next);
            else
                std::memcpy(next, now, sizeof found[0]);
            for (int64_t h = 0; h < heads_; h++)
                step(h, first, (int)std::min<int64_t>(kKeys, keys - first), now, next);
        }
        for (int64_t h = 0; h < heads_; h++) finish(h);
    }

   private:
    using W = Weight<T>;
    static constexpr bool kPairs = sizeof(W) == 2;

    const Attention& a;
    const Batch& batch_;
    const QueryTile& tile_;
    const int64_t first_head_, heads_, group_, rows_, panels_, width_;
    const bool few_;
    W *value_, *weights_;
    float *score_, *mixed_, *states_;
    T *panel_, *queries_;

    HeadState<T> state(int64_t h) const {
        float* out = states_ + h * rows_ * (width_ + 2);
        return {queries_ + h * rows_ * a.dim, out, out + rows_ * width_, out + rows_ * (width_ + 1)};
    }

    void begin(int64_t h) {
        copy_queries(a, tile_, first_head_ + h, state(h).query);
        clear(state(h), rows_, width_);
    }

    void finish(int64_t h) { write_results(a, tile_, first_head_ + h, state(h), width_); }

    // Where a head's keys from the first on begin; values follow `kv_heads * dim` behind. A short tile's last key is
    // repeated.
    void find(const QueryTile& tile, int64_t head, int64_t first, const T** keys) const {
        const int count = (int)std::min<int64_t>(kKeys, tile.visible + tile.count - 1 - first);
        const int64_t* block = batch_.blocks + batch_.starts[tile.sequence] + first / a.block_size;
        const int64_t slot_size = 2 * a.kv_heads * a.dim;
        int64_t offset = first % a.block_size;
        for (int j = 0; j < count; block++, offset = 0) {
            const T* key = (const T*)a.cache + (*block * a.block_size + offset) * slot_size + head * a.dim;
            for (; offset < a.block_size && j < count; offset++, key += slot_size) keys[j++] = key;
        }
        for (int j = count; j < kKeys; j++) keys[j] = keys[count - 1];
    }

    // `count` keys from `first` on; `found` are the first head's. Those of the next tile are brought near meanwhile, a
    // few at a time, since no pattern tells the CPU where they are.
    void step(int64_t h, int64_t first, int count, const T* const* found, const T* const* found_next) {
        const HeadState<T> s = state(h);
        const T *keys[kKeys], *next[kKeys];
        for (int j = 0; j < kKeys; j++) keys[j] = found[j] + h * a.dim, next[j] = found_next[j] + h * a.dim;
        for (int j = 0; j < count; j += NR) {
            for (int i = j; i < std::min(j + NR, kKeys); i++) bring(next[i], a.dim);
            pack_keys(keys + j, std::min(NR, count - j), a.dim, panel_);
            for_tiles(rows_, [&](int64_t r, int n) {
                tile_rows<T>(n, s.query + r * a.dim, a.dim, panel_, a.dim, mixed_);
                for (int i = 0; i < n; i++)
                    std::memcpy(score_ + (r + i) * kKeys + j, mixed_ + i * NR, NR * sizeof(float));
            });
        }
        const int used = (count + NR - 1) / NR * NR;
        if (!few_) pack_values(keys, next, count);
        float shrink[kQueryRows];
        for (int64_t r = 0; r < rows_; r += kQueryRows) {
            const int64_t some = std::min<int64_t>(kQueryRows, rows_ - r);
            for (int64_t i = 0; i < some; i++)
                shrink[i] = soften(score_ + (r + i) * kKeys, tile_.visible + (r + i) / group_ - first, used,
                                   (float)a.scale, s.top[r + i], s.total[r + i], weights_ + (r + i) * kKeys);
            if constexpr (!kPairs)
                if (few_) {
                    mix_from_cache(s, count, keys, next, shrink);
                    continue;
                }
            mix(s, r, some, count, shrink);
        }
    }

    // Values of a tile as panels, in pairs where weights are.
    void pack_values(const T* const* keys, const T* const* next, int count) {
        const int64_t behind = a.kv_heads * a.dim;
        for (int j = 0; j < count; j++) bring(next[j] + behind, a.dim);
        for (int64_t p = 0; p < panels_; p++)
            for (int j = 0; j < count; j += kPairs ? 2 : 1)
                for (int half = 0; half < 2; half++) {
                    const int64_t column = p * NR + half * L, left = a.dim - column;
                    vf first = value_at(keys[j] + behind + column, left);
                    if constexpr (kPairs) {
                        const vf second = j + 1 < count ? value_at(keys[j + 1] + behind + column, left) : vf{};
                        first = (vf)((vu)first >> 16 | (vu)second);
                    }
                    std::memcpy((char*)value_ + ((p * kKeys + j) * NR * sizeof(W) + half * sizeof first), &first, sizeof first);
                }
    }

    static vf value_at(const T* p, int64_t left) {
        return left >= L ? load(p) : left > 0 ? load_some(p, (int)left) : vf{};
    }

    void mix(const HeadState<T>& s, int64_t r, int64_t some, int count, const float* shrink) {
        for (int64_t p = 0; p < panels_; p++)
            for_tiles(some, [&](int64_t at, int n) {
                tile_rows<W>(n, weights_ + (r + at) * kKeys, kKeys, value_ + p * kKeys * NR, count, mixed_);
                for (int i = 0; i < n; i++)
                    add_up(s.out + (r + at + i) * width_ + p * NR, mixed_ + i * NR, 2, shrink[at + i]);
            });
    }

    void mix_from_cache(const HeadState<T>& s, int count, const T* const* keys, const T* const* next,
                        const float* shrink) {
        for (int64_t d = 0; d < a.dim; d += kWide * L) {
            mix_few<T>((int)rows_, weights_, kKeys, keys, next, a.kv_heads * a.dim + d, count, mixed_);
            for (int64_t r = 0; r < rows_; r++)
                add_up(s.out + r * width_ + d, mixed_ + r * kWide * L, kWide, shrink[r]);
        }
    }

    static void add_up(float* out, const float* part, int vectors, float shrink) {
        for (int i = 0; i < vectors; i++) store(out + i * L, load(out + i * L) * shrink + load(part + i * L));
    }
};

// How attention falls into tasks: so many KV heads of a query tile, and so many of these together.
struct AttentionCut {
    int64_t heads, splits, pairs, each;
};

static inline AttentionCut cut_attention(const Attention& a, int64_t tiles, int threads) {
    AttentionCut cut;
    cut.heads = tiles >= threads * 4 ? a.kv_heads : 1;
    cut.splits = a.kv_heads / cut.heads;
    cut.pairs = tiles * cut.splits;
    cut.each = std::max<int64_t>(1, cut.pairs / (threads * 8));
    return cut;
}
