// Draws: temperature, min-p, top-k, top-p over what those leave, then inverse transform over the kept tokens in order of
// their ids; and what log probabilities are made of. Contracts: `kernels/reference/sampling.py`, `logprobs.py`.
#pragma once

#include <algorithm>

#include "logits.h"

// Distances from the best logit within which top-p looks for its tokens, one after the other, before it takes all.
constexpr float kDepths[] = {3.0f, 6.0f, 9.0f, 12.0f};
constexpr int kLevels = sizeof kDepths / sizeof *kDepths;
// The masses at these depths are summed in float32.
constexpr double kRough = 1e-3;

// The mass of a row, within a block first, then block by block; of `rough` null no masses by depth.
static inline double weigh_all(const LogitRow& row, Kept& kept, float* rough) {
    vf depths[kLevels] = {};
    kept.masses.resize(std::max<size_t>(kept.masses.size(), row.blocks));
    double total = 0;
    for (int64_t b = 0; b < row.blocks; b++) {
        vf sum = {};
        for (int64_t i = b * kPeak; i < (b + 1) * kPeak; i += L) {
            const vf x = row.at(i) - row.best, weight = weight_v(x);
            sum += weight;
            if (rough)
                for (int d = 0; d < kLevels; d++) depths[d] += x >= -kDepths[d] ? weight : splat(0.0f);
        }
        kept.masses[b] = sum_lanes(sum);
        total += kept.masses[b];
    }
    for (int d = 0; d < kLevels && rough; d++) rough[d] = sum_lanes(depths[d]);
    return total;
}

// Where a running sum to `total` passes a point: below the total, so that the search ends where there is weight.
static inline double within(double point, double total) {
    return std::max(0.0, std::min(point, std::nextafter(total, 0.0)));
}

static inline int64_t pick_any(const LogitRow& row, Kept& kept, double uniform) {
    const double total = weigh_all(row, kept, nullptr), point = within(uniform * total, total);
    double sum = 0, before = 0;
    int64_t block = -1;
    while (block + 1 < row.blocks && sum <= point) before = sum, sum += kept.masses[++block];
    float weights[kPeak];
    for (int64_t i = 0; i < kPeak; i += L) store(weights + i, weight_v(row.at(block * kPeak + i) - row.best));
    double inside = 0;
    for (float weight : weights) inside += weight;
    const double left = within(point - before, inside);
    sum = 0;
    int64_t place = -1;
    while (place + 1 < kPeak && sum <= left) sum += weights[++place];
    return block * kPeak + place;
}

static inline int64_t pick_kept(const Kept& kept, double uniform) {
    const double total = kept.mass(), point = within(uniform * total, total);
    double sum = 0;
    int64_t place = -1;
    while (place + 1 < kept.count && sum <= point) sum += kept.weights[++place];
    return kept.ids[place];
}

// What top-p alone keeps: the least of it. Leaves in `kept` at least what is kept.
static inline float cut_all(const LogitRow& row, Kept& kept, double share) {
    float rough[kLevels];
    const double target = share * weigh_all(row, kept, rough);
    for (int d = 0; d < kLevels; d++) {
        if (rough[d] < target * (1 + kRough)) continue;
        kept.take(row, row.best - kDepths[d]);
        kept.weigh(row.best);
        if (const Cut found = cut(kept, kept.weights.data(), target); found.reached) return found.value;
    }
    kept.take(row, -FLT_MAX);
    kept.weigh(row.best);
    return cut(kept, kept.weights.data(), share * kept.mass()).value;
}

// The least quotient that is kept, and in `kept` at least what is kept, with its weights.
static inline float filter(const LogitRow& row, Kept& kept, float least, int64_t k, double share) {
    if (k == 0 && least == -INFINITY) return cut_all(row, kept, share);
    float threshold = least;
    kept.take(row, k ? std::max(least, bound_of_greatest(kept, row, k)) : least);
    if (k && kept.count >= k) threshold = std::max(least, cut(kept, nullptr, (double)k).value);
    kept.weigh(row.best);
    if (share >= 1.0) return threshold;
    kept.narrow(threshold);
    return cut(kept, kept.weights.data(), share * kept.mass()).value;
}

// Philox4x32-10 of (position, choice) under a seed: 53 bits in [0, 1).
static inline double uniform_of(uint64_t seed, uint64_t choice, uint64_t position) {
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)choice, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 10; i++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
    }
    return (double)(((uint64_t)c0 << 32 | c1) >> 11) * 0x1p-53;
}

static inline Kept& own_space() {
    static thread_local Kept kept;
    return kept;
}

static inline void run_draw(const Draw& d, int64_t place) {
    const int64_t number = d.rows ? d.rows[place] : place;
    const LogitRow row(d.x, number, d.temperature[place]);
    int64_t& token = d.tokens[place];
    token = 0, d.thresholds[place] = NAN;
    if (!(std::fabs(row.best) <= FLT_MAX)) return;  // the contract has none
    Kept& kept = own_space();
    const double uniform = d.uniform ? d.uniform[place] : uniform_of(d.seeds[place], d.choices[place],
                                                                       d.positions[place]);
    const int64_t k = d.top_k[place] > 0 && d.top_k[place] < d.x.vocab ? d.top_k[place] : 0;
    const float least = row.best + (float)std::log(d.min_p[place]);
    if (k == 0 && least == -INFINITY && d.top_p[place] >= 1.0) {
        d.thresholds[place] = -INFINITY;
        token = pick_any(row, kept, uniform);
        return;
    }
    const float threshold = d.thresholds[place] = filter(row, kept, least, k, d.top_p[place]);
    if (threshold >= row.best) {
        token = first_greatest(d.x, number);
        return;
    }
    kept.narrow(threshold);
    token = pick_kept(kept, uniform);
}

// The `count` greatest and their ids: descending, equal ones by id.
static inline void find_largest(const Scores& s, int64_t number, Kept& kept) {
    const LogitRow row(s.x, number, 1.0f);
    kept.take(row, bound_of_greatest(kept, row, s.count));
    if (kept.count > s.count) kept.narrow(cut(kept, nullptr, (double)s.count).value);
    std::vector<int32_t> order(kept.count);
    for (int64_t i = 0; i < kept.count; i++) order[i] = (int32_t)i;
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return kept.values[a] != kept.values[b] ? kept.values[a] > kept.values[b] : a < b;
    });
    float* values = s.largest + number * s.count;
    int64_t *ids = s.ids + number * s.count, found = std::min(kept.count, s.count);
    for (int64_t i = 0; i < found; i++) values[i] = kept.values[order[i]], ids[i] = kept.ids[order[i]];
    for (int64_t token = 0; token < s.x.vocab && found < s.count; token++)
        if (row.values[token] == -INFINITY) values[found] = -INFINITY, ids[found++] = token;
}

static inline int64_t count_above(const LogitRow& row, float limit) {
    int64_t count = 0;
    for (int64_t b = 0; b < row.blocks; b++)
        if (row.peaks[b] > limit)
            for (int64_t i = b * kPeak; i < (b + 1) * kPeak; i++) count += row.values[i] > limit;
    return count;
}

// Whatever of them has a place to go.
static inline void run_scores(const Scores& s, int64_t number) {
    Kept& kept = own_space();
    const LogitRow row(s.x, number, 1.0f);
    if (s.tokens) s.tokens[number] = first_greatest(s.x, number);
    if (s.above) s.above[number] = count_above(row, s.limits[number]);
    if (s.norms) s.norms[number] = std::log(weigh_all(row, kept, nullptr)) + (double)row.best;
    if (s.largest) find_largest(s, number, kept);
}
