// Rows of logits, of which only the blocks that matter are looked at: their maxima tell which. What is found in a row is
// a function of that row alone: sums go from block to block, or from token to token, in float64.
#pragma once

#include <cfloat>
#include <cmath>
#include <vector>

#include "abi.h"
#include "gemm.h"
#include "vec.h"

// Numbers of elements that are sorted rather than cut into buckets.
constexpr int64_t kSorted = 32;
constexpr int kBuckets = 256;

// Logits divided by a temperature. Division by a positive number keeps the order, so maxima are those of the quotients.
struct LogitRow {
    const float *values, *peaks;
    int64_t blocks;
    float scale, best;

    LogitRow(const Logits& x, int64_t row, float scale)
        : values(x.values + row * x.blocks * kPeak), peaks(x.peaks + row * x.blocks), blocks(x.blocks), scale(scale) {
        float most = -INFINITY;
        for (int64_t b = 0; b < blocks; b++) most = peaks[b] > most || peaks[b] != peaks[b] ? peaks[b] : most;
        best = most / scale;
    }

    vf at(int64_t token) const { return load(values + token) / scale; }
    float peak(int64_t block) const { return peaks[block] / scale; }
};

// e^x, and nothing where that would be less than the least normal number.
static inline vf weight_v(vf x) {
    return x >= -87.3f ? exp_v(x) : splat(0.0f);
}

// Tokens of a row in order of their ids. Arrays keep their size from row to row.
struct Kept {
    std::vector<float> values, weights, rest_values, rest_weights;
    std::vector<int32_t> ids;
    std::vector<double> masses;  // of a row's blocks
    int64_t count = 0;

    void reserve(int64_t size) {
        size += L;  // vectors may reach beyond the end
        if ((int64_t)values.size() >= size) return;
        values.resize(size), weights.resize(size), rest_values.resize(size), rest_weights.resize(size), ids.resize(size);
    }

    void add(vf x, int64_t first, float limit) {
#if defined(__AVX512F__)
        const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GE_OQ);
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        store(values.data() + count, (vf)_mm512_maskz_compress_ps(kept, (__m512)x));
        const __m512i found = _mm512_maskz_compress_epi32(kept, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)first)));
        _mm512_storeu_si512(ids.data() + count, found);
        count += __builtin_popcount(kept);
#else
        float lane[L];
        store(lane, x);
        for (int j = 0; j < L; j++) {
            values[count] = lane[j], ids[count] = (int32_t)(first + j);
            count += lane[j] >= limit;
        }
#endif
    }

    // All that is finite and at or above the limit.
    void take(const LogitRow& row, float limit) {
        limit = std::max(limit, -FLT_MAX);
        int64_t blocks = 0;
        for (int64_t b = 0; b < row.blocks; b++) blocks += row.peak(b) >= limit;
        reserve(blocks * kPeak);
        count = 0;
        for (int64_t b = 0; b < row.blocks; b++)
            if (row.peak(b) >= limit)
                for (int64_t i = b * kPeak; i < (b + 1) * kPeak; i += L) add(row.at(i), i, limit);
    }

    // The blocks' maxima, for what they tell of the row.
    void take_peaks(const LogitRow& row) {
        reserve(row.blocks);
        count = 0;
        for (int64_t b = 0; b < row.blocks; b++) {
            values[count] = row.peak(b);
            count += values[count] >= -FLT_MAX;
        }
    }

    void weigh(float best) {
        for (int64_t i = 0; i < count; i += L) {
            if (count - i < L) std::fill_n(values.begin() + count, L - (count - i), -INFINITY);
            store(weights.data() + i, weight_v(load(values.data() + i) - best));
        }
    }

    // Lets go of what is below a threshold.
    void narrow(float threshold) {
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            values[left] = values[i], weights[left] = weights[i], ids[left] = ids[i];
            left += values[i] >= threshold;
        }
        count = left;
    }

    double mass() const {
        double sum = 0;
        for (int64_t i = 0; i < count; i++) sum += weights[i];
        return sum;
    }
};

// The least of the greatest values that have a weight of `target` between them, and whether they have it; else the least
// that has any weight.
struct Cut {
    float value;
    bool reached;
};

// Of equal width, for values in [low, high], low < high.
struct Buckets {
    double high, scale, mass[kBuckets] = {};

    Buckets(float low, float high) : high(high), scale((kBuckets - 1) / ((double)high - low)) {}
    int of(float value) const { return (int)((high - value) * scale); }

    // The bucket where `passed` and the masses reach the target, else the last with any, and `passed` as it is before
    // that one. Whether it is reached.
    bool find(double target, double& passed, int& bucket) const {
        double sum = passed;
        bucket = 0;
        for (int b = 0; b < kBuckets; b++) {
            if (mass[b] == 0) continue;
            passed = sum, bucket = b;
            sum += mass[b];
            if (sum >= target) return true;
        }
        return false;
    }
};

static inline void bounds_of(const float* values, int64_t n, float& low, float& high) {
    vf least = splat(values[0]), most = least;
    int64_t i = 0;
    for (; i + L <= n; i += L) {
        const vf v = load(values + i);
        least = v < least ? v : least, most = v > most ? v : most;
    }
    float lows[L], highs[L];
    store(lows, least), store(highs, most);
    low = lows[0], high = highs[0];
    for (int j = 1; j < L; j++) low = std::min(low, lows[j]), high = std::max(high, highs[j]);
    for (; i < n; i++) low = std::min(low, values[i]), high = std::max(high, values[i]);
}

static inline Cut cut_few(float* values, float* weights, int64_t n, double target, double passed) {
    for (int64_t i = 1; i < n; i++)  // descending
        for (int64_t j = i; j > 0 && values[j] > values[j - 1]; j--)
            std::swap(values[j], values[j - 1]), std::swap(weights[j], weights[j - 1]);
    float last = values[0];
    for (int64_t i = 0; i < n; i++) {
        passed += weights[i];
        if (weights[i] > 0) last = values[i];
        if (passed >= target) return {values[i], true};
    }
    return {last, false};
}

// Of at least one value, all finite; null weights are 1 each. Goes through buckets, then through the one where the sum
// passes the target, and so on. Changes `rest_values` and `rest_weights`.
static inline Cut cut(Kept& kept, const float* weights, double target) {
    const float* values = kept.values.data();
    float *rest = kept.rest_values.data(), *heavy = kept.rest_weights.data();
    int64_t n = kept.count;
    double passed = 0;
    bool reached = true;
    while (n > kSorted) {
        float low, high;
        bounds_of(values, n, low, high);
        if (low == high) {
            for (int64_t i = 0; i < n; i++) passed += weights ? weights[i] : 1.0f;
            return {low, values == rest ? reached : passed >= target};
        }
        Buckets buckets(low, high);
        for (int64_t i = 0; i < n; i++) buckets.mass[buckets.of(values[i])] += weights ? weights[i] : 1.0f;
        int bucket;
        const bool here = buckets.find(target, passed, bucket);
        if (values != rest) reached = here;  // later only rounding can miss it
        int64_t left = 0;
        for (int64_t i = 0; i < n; i++) {
            const bool mine = buckets.of(values[i]) == bucket;
            const float weight = weights ? weights[i] : 1.0f;
            rest[left] = values[i], heavy[left] = weight;
            left += mine;
        }
        values = rest, weights = heavy, n = left;
    }
    if (values != rest) {
        std::copy_n(values, n, rest);
        weights ? (void)std::copy_n(weights, n, heavy) : (void)std::fill_n(heavy, n, 1.0f);
        return cut_few(rest, heavy, n, target, passed);
    }
    return {cut_few(rest, heavy, n, target, passed).value, reached};
}

// A limit that the k greatest tokens are not below; -FLT_MAX where the blocks are too few to tell: the k best blocks
// have a token each that is no less than the k-th best of their maxima.
static inline float bound_of_greatest(Kept& kept, const LogitRow& row, int64_t k) {
    if (k > row.blocks) return -FLT_MAX;
    kept.take_peaks(row);
    return kept.count < k ? -FLT_MAX : cut(kept, nullptr, (double)k).value;
}

// The first token with the row's maximum; 0 where that is NaN.
static inline int64_t first_greatest(const Logits& x, int64_t row) {
    const LogitRow plain(x, row, 1.0f);
    int64_t block = 0;
    while (block < plain.blocks && plain.peaks[block] != plain.best) block++;
    for (int64_t i = block * kPeak; i < std::min(block + 1, plain.blocks) * kPeak; i++)
        if (plain.values[i] == plain.best) return i;
    return 0;
}

static inline void run_maxima(const Maxima& m, int64_t row) {
    float* peaks = m.peaks + row * m.blocks;
    const float* values = m.values + row * m.blocks * kPeak;
    for (int64_t b = 0; b < m.blocks && m.values; b++) {
        vf most = load(values + b * kPeak);
        for (int64_t i = L; i < kPeak; i += L) most = max_or_nan(most, load(values + b * kPeak + i));
        peaks[b] = max_lanes(most);
    }
    float best = -INFINITY;
    for (int64_t b = 0; b < m.blocks; b++) best = peaks[b] > best || peaks[b] != peaks[b] ? peaks[b] : best;
    m.best[row] = best;
}
