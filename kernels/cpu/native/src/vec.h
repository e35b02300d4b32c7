// Vectors as wide as the CPU's registers, by the compiler's vector extensions; bfloat16; exponentials.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// bfloat16 pairs are multiplied and added by one instruction.
#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ROPEWAY_DPBF16 1
#else
#define ROPEWAY_DPBF16 0
#endif

constexpr int L = kVectorBytes / 4;  // float32 lanes
constexpr int NR = 2 * L;            // columns of a packed panel
constexpr int MR = 12;               // most rows of a micro-kernel's tile

typedef float vf __attribute__((vector_size(kVectorBytes)));
typedef int32_t vi __attribute__((vector_size(kVectorBytes)));
typedef uint32_t vu __attribute__((vector_size(kVectorBytes)));
typedef uint16_t vh __attribute__((vector_size(kVectorBytes / 2)));

struct bf16 {
    uint16_t bits;
};

static inline vf splat(float x) {
    return x - vf{};
}

static inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline vf load(const bf16* p) {
    vh half;
    std::memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

static inline void store(float* p, vf v) {
    std::memcpy(p, &v, sizeof v);
}

// Rounds to nearest, ties to even; a NaN stays one.
static inline void store(bf16* p, vf v) {
#if ROPEWAY_DPBF16
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &half, sizeof half);
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vu quiet = (bits >> 16) | 0x40u;
    vu picked = (vu)(v == v) ? rounded : quiet;
    vh half = __builtin_convertvector(picked, vh);
    std::memcpy(p, &half, sizeof half);
#endif
}

static inline float widen(float x) {
    return x;
}

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// The first n of L lanes, through memory: only at the end of a row.
template <class T>
static inline vf load_some(const T* p, int n) {
    T full[L] = {};
    std::memcpy(full, p, n * sizeof(T));
    return load(full);
}

template <class T>
static inline void store_some(T* p, vf v, int n) {
    T full[L];
    store(full, v);
    std::memcpy(p, full, n * sizeof(T));
}

// A NaN wins: once in `most`, it stays.
static inline vf max_or_nan(vf most, vf x) {
    return (x > most) | (x != x) ? x : most;
}

// Lanes in a fixed order of halves.
static inline float sum_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float lane[L];
    store(lane, v);
    for (int width = L / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

// NaN where a lane is one.
static inline float max_lanes(vf v) {
#if defined(__AVX512F__)
    const float most = _mm512_reduce_max_ps((__m512)v);
    return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) ? __builtin_nanf("") : most;
#endif
    float lane[L];
    store(lane, v);
    for (int width = L / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] = (lane[i + width] > lane[i] || lane[i + width] != lane[i + width]) ? lane[i + width] : lane[i];
    return lane[0];
}

// e^x within 2 units in the last place, clamped to [-87.3, 88.3]; a NaN stays one. Range reduction by multiples of ln 2
// and a polynomial of degree 6, as in Cephes' expf.
static inline vf exp_v(vf x) {
#if defined(__AVX512F__)
    // Of a NaN and a number, the second operand.
    x = (vf)_mm512_min_ps(_mm512_set1_ps(88.3f), _mm512_max_ps(_mm512_set1_ps(-87.3f), (__m512)x));
    const vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = x < -87.3f ? splat(-87.3f) : x;
    x = x > 88.3f ? splat(88.3f) : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const vf n = (x * 1.44269504088896341f + magic) - magic;
#endif
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    // Of a NaN the conversion below would be undefined.
    vf whole = n == n ? n : splat(0.0f);
    vi power = (__builtin_convertvector(whole, vi) + 127) << 23;
    return y * (vf)power;
#endif
}

// 1 / x within 2 units in the last place, of what is neither zero nor infinite.
static inline vf inverse_v(vf x) {
#if defined(__AVX512F__)
    const vf near = (vf)_mm512_rcp14_ps((__m512)x);
    return near * (2.0f - x * near);
#else
    return 1.0f / x;
#endif
}

static inline vf silu_v(vf x) {
    return x * inverse_v(1.0f + exp_v(-x));
}
