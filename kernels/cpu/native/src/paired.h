// Attention over a cache in pairs, see `cache.h`: bit for bit what `attention.h` gives where blocks lie plainly.
#pragma once

#include "attention.h"
#include "cache.h"

#if ROPEWAY_DPBF16

constexpr int kRuns = kKeys / L;  // of a tile: L keys that follow each other in a block

// Of the first KV head of a task: those of others follow at the same distance.
struct Run {
    const char *keys, *values;
};

// The lines of a run's keys or of its values, dim / 2 in either case.
struct Lines {
    const char* first;
    int64_t step;
    // Into the second cache: a whole tile does not fit into the first one.
    void bring(int64_t i) const { _mm_prefetch(first + i * step, _MM_HINT_T1); }
};

static inline __m512bh pairs_at(const char* p) {
    return (__m512bh)_mm512_loadu_si512(p);
}

// `score` [R][kKeys], of which two runs of columns = query [R][dim] . keys; two runs of `next` are brought near meanwhile.
template <int R>
static __attribute__((noinline)) void score_runs(const bf16* query, int64_t dim, const char* first, const char* second,
                                                 const Lines* next, int64_t step, float* score) {
    __m512 acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    const bf16 *p0 = query, *p1 = query + 3 * dim, *p2 = query + 6 * dim, *p3 = query + 9 * dim;
    for (int64_t i = 0; i < dim / 2; i++) {
        const __m512bh b0 = pairs_at(first), b1 = pairs_at(second);
        next[0].bring(i);
        next[1].bring(i);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const __m512bh x = pair_of((r < 3 ? p0 : r < 6 ? p1 : r < 9 ? p2 : p3) + r % 3 * dim);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, b0);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, b1);
        }
        p0 += 2, p1 += 2, p2 += 2, p3 += 2, first += step, second += step;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(score + r * kKeys, acc[r][0]);
        _mm512_storeu_ps(score + r * kKeys + L, acc[r][1]);
    }
}

// `out` [R][.] = out * shrink + weights [R][kKeys] @ values, V vectors of columns.
template <int R, int V>
static __attribute__((noinline)) void mix_runs(const bf16* weights, const Run* runs, const Lines* next, int64_t column,
                                               int64_t dim, int count, const float* shrink, float* out, int64_t stride) {
    __m512 acc[R][V];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = _mm512_setzero_ps();
    auto add = [&](const bf16* pair, const char* values, __m512i mask) {
        __m512bh b[V];
        for (int v = 0; v < V; v++)
            b[v] = (__m512bh)_mm512_and_si512(_mm512_loadu_si512(values + v * 64), mask);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const __m512bh x = pair_of(pair + r * kKeys);
            for (int v = 0; v < V; v++) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], x, b[v]);
        }
    };
    const __m512i all = _mm512_set1_epi32(-1);
    for (int run = 0; run * L < count; run++) {
        const char* values = runs[run].values + column * 4;
        const int pairs = std::min(L, count - run * L) / 2;
        for (int j = 0; j < pairs; j++, values += dim * 4, weights += 2) {
            for (int v = 0; v < V; v++) next[run].bring((j * dim + column) / L + v);
            add(weights, values, all);
        }
        // Nobody has written the other half.
        if (count - run * L < L && count % 2) add(weights, values, _mm512_set1_epi32(0xffff));
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float* sum = out + r * stride + v * L;
            store(sum, load(sum) * shrink[r] + (vf)acc[r][v]);
        }
}

static inline void score_rows(int rows, const bf16* query, int64_t dim, const char* first, const char* second,
                              const Lines* next, int64_t step, float* score) {
    using Function = void (*)(const bf16*, int64_t, const char*, const char*, const Lines*, int64_t, float*);
    static const Function functions[MR] = {score_runs<1>, score_runs<2>,  score_runs<3>,  score_runs<4>,
                                           score_runs<5>, score_runs<6>,  score_runs<7>,  score_runs<8>,
                                           score_runs<9>, score_runs<10>, score_runs<11>, score_runs<12>};
    functions[rows - 1](query, dim, first, second, next, step, score);
}

constexpr int kFew = 6;  // rows of which four vectors fit into registers

// All columns.
static inline void mix_rows(int rows, const bf16* weights, const Run* runs, const Lines* next, int64_t dim, int count,
                            const float* shrink, float* out) {
    using Function = void (*)(const bf16*, const Run*, const Lines*, int64_t, int64_t, int, const float*, float*, int64_t);
    static const Function few[kFew] = {mix_runs<1, 4>, mix_runs<2, 4>, mix_runs<3, 4>,
                                       mix_runs<4, 4>, mix_runs<5, 4>, mix_runs<6, 4>};
    static const Function many[MR] = {mix_runs<1, 2>, mix_runs<2, 2>,  mix_runs<3, 2>,  mix_runs<4, 2>,
                                      mix_runs<5, 2>, mix_runs<6, 2>,  mix_runs<7, 2>,  mix_runs<8, 2>,
                                      mix_runs<9, 2>, mix_runs<10, 2>, mix_runs<11, 2>, mix_runs<12, 2>};
    const bool wide = rows <= kFew && dim % (4 * L) == 0;
    const Function function = wide ? few[rows - 1] : many[rows - 1];
    for (int64_t d = 0; d < dim; d += (wide ? 4 : 2) * L)
        function(weights, runs, next, d, dim, count, shrink, out + d, dim);
}

// A query tile and some KV heads.
class PairedTask {
   public:
    PairedTask(const Attention& attention, const Batch& batch, const QueryTile& tile, int64_t first_head, int64_t heads,
               Scratch& scratch)
        : a(attention), batch_(batch), tile_(tile), first_head_(first_head), heads_(heads),
          group_(a.heads / a.kv_heads), rows_(tile.count * group_), step_(a.block_size * 4),
          head_bytes_(a.block_size * a.dim * 2) {
        const int64_t floats = rows_ * (kKeys + 1) + heads * rows_ * (a.dim + 2);
        score_ = (float*)scratch.take(floats * sizeof(float) + rows_ * (kKeys + heads * a.dim) * sizeof(bf16));
        shrink_ = score_ + rows_ * kKeys;
        states_ = shrink_ + rows_;
        weights_ = (bf16*)(states_ + heads * rows_ * (a.dim + 2));
        queries_ = weights_ + rows_ * kKeys;
    }

    // `after`: what the same thread goes on with, or null.
    void run(const QueryTile* after, int64_t after_head) {
        for (int64_t h = 0; h < heads_; h++) begin(h);
        const int64_t keys = tile_.visible + tile_.count - 1;
        Run now[kRuns], coming[kRuns];
        find(tile_, first_head_, 0, now);
        for (int64_t first = 0; first < keys; first += kKeys) {
            const int count = (int)std::min<int64_t>(kKeys, keys - first);
            if (first + kKeys < keys)
                find(tile_, first_head_, first + kKeys, coming);
            else if (after)
                find(*after, after_head, 0, coming);
            else
                std::copy(now, now + kRuns, coming);
            for (int64_t h = 0; h < heads_; h++) step(h, first, count, now, coming);
            std::copy(coming, coming + kRuns, now);
        }
        for (int64_t h = 0; h < heads_; h++) finish(h);
    }

   private:
    const Attention& a;
    const Batch& batch_;
    const QueryTile& tile_;
    const int64_t first_head_, heads_, group_, rows_, step_, head_bytes_;
    float *score_, *shrink_, *states_;
    bf16 *weights_, *queries_;

    HeadState<bf16> state(int64_t h) const {
        float* out = states_ + h * rows_ * (a.dim + 2);
        return {queries_ + h * rows_ * a.dim, out, out + rows_ * a.dim, out + rows_ * (a.dim + 1)};
    }

    void begin(int64_t h) {
        copy_queries(a, tile_, first_head_ + h, state(h).query);
        clear(state(h), rows_, a.dim);
    }

    void finish(int64_t h) { write_results(a, tile_, first_head_ + h, state(h), a.dim); }

    // The runs of a tile; those behind its end are its last one.
    void find(const QueryTile& tile, int64_t head, int64_t first, Run* runs) const {
        const int64_t count = std::min<int64_t>(kKeys, tile.visible + tile.count - 1 - first);
        const int64_t* blocks = batch_.blocks + batch_.starts[tile.sequence];
        for (int run = 0; run < kRuns; run++) {
            const int64_t key = first + std::min<int64_t>(run, (count - 1) / L) * L, offset = key % a.block_size;
            const char* block = (const char*)a.cache + blocks[key / a.block_size] * 2 * a.kv_heads * head_bytes_;
            runs[run].keys = block + head * head_bytes_ + offset * 4;
            runs[run].values = block + (a.kv_heads + head) * head_bytes_ + offset * a.dim * 2;
        }
    }

    // A head's share of a tile that comes next, in the order of its addresses: so the CPU sees how it goes on.
    void share(int64_t h, const Run* coming, Lines* lines) const {
        for (int i = 0; i < 2 * kRuns; i++) {
            const int64_t place = h * 2 * kRuns + i, head = place % (2 * heads_);
            const Run& run = coming[place / (2 * heads_)];
            if (head < heads_)
                lines[i] = {run.keys + head * head_bytes_, step_};
            else
                lines[i] = {run.values + (head - heads_) * head_bytes_, 64};
        }
    }

    // `count` keys from `first` on, of the runs `found`, and what is `coming` is brought near.
    void step(int64_t h, int64_t first, int count, const Run* found, const Run* coming) {
        const HeadState<bf16> s = state(h);
        Run runs[kRuns];
        for (int i = 0; i < kRuns; i++)
            runs[i] = {found[i].keys + h * head_bytes_, found[i].values + h * head_bytes_};
        Lines next[2 * kRuns];
        const Lines known = {(const char*)s.query, 0}, none[kRuns] = {known, known, known, known};
        share(h, coming, next);
        const int used = (count + L - 1) / L * L;
        for (int run = 0; run * L < used; run += 2) {
            for_tiles(rows_, [&](int64_t r, int n) {
                score_rows(n, s.query + r * a.dim, a.dim, runs[run].keys, runs[run + 1].keys, r ? none : next + run, step_,
                           score_ + r * kKeys + run * L);
            });
        }
        for (int64_t r = 0; r < rows_; r++)
            shrink_[r] = soften(score_ + r * kKeys, tile_.visible + r / group_ - first, used, (float)a.scale, s.top[r],
                                s.total[r], weights_ + r * kKeys);
        for_tiles(rows_, [&](int64_t r, int n) {
            mix_rows(n, weights_ + r * kKeys, runs, r ? none : next + kRuns, a.dim, count, shrink_ + r,
                     s.out + r * a.dim);
        });
        for (int run = used / L; run < kRuns; run++)  // what a short tile has not come to
            for (int64_t i = 0; i < a.dim / 2; i++) next[run].bring(i), next[kRuns + run].bring(i);
    }
};

#endif

static inline void run_attention(const Attention& a, const Batch& batch, const std::vector<QueryTile>& tiles,
                                 int threads, int64_t task, Scratch& scratch) {
    const AttentionCut cut = cut_attention(a, (int64_t)tiles.size(), threads);
    const int64_t last = std::min(cut.pairs, (task + 1) * cut.each);
    for (int64_t pair = task * cut.each; pair < last; pair++) {
        const QueryTile& tile = tiles[pair / cut.splits];
        const QueryTile* after = pair + 1 < last ? &tiles[(pair + 1) / cut.splits] : nullptr;
        const int64_t head = pair % cut.splits * cut.heads, after_head = (pair + 1) % cut.splits * cut.heads;
#if ROPEWAY_DPBF16
        if (is_paired(a.dtype, a.block_size, a.dim)) {
            PairedTask(a, batch, tile, head, cut.heads, scratch).run(after, after_head);
            continue;
        }
#endif
        if (a.dtype == kBFloat16)
            AttentionTask<bf16>(a, batch, tile, head, cut.heads, scratch).run(after, after_head);
        else
            AttentionTask<float>(a, batch, tile, head, cut.heads, scratch).run(after, after_head);
    }
}
