// Shared by the native kernels: vectors by compiler extensions, their log2 and exp2, working memory, 16-bit numbers, and what
// the compiler supported.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <utility>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

enum Storage : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

constexpr double FLOOR = -1.0e12;  // represents log2 of 0: far below the logarithm of any power of any number

// ---- vectors ----

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float R __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t Bits __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t Int;
    static constexpr int mantissa = 23, bias = 127, rescale = 24;
    static constexpr Int root_half = 0x3f3504f3;
    static constexpr double magic = 12582912.0;  // added and subtracted again, it rounds to an integer
};
template <> struct Lanes<double> {
    typedef double R __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t Bits __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t Int;
    static constexpr int mantissa = 52, bias = 1023, rescale = 54;
    static constexpr Int root_half = 0x3fe6a09e667f3bcd;
    static constexpr double magic = 6755399441055744.0;
};
template <class T> using R = typename Lanes<T>::R;         // a register, for matmuls
template <class T> using Bits = typename Lanes<T>::Bits;   // the same as integers, or as a mask: 0 or -1
template <class T> constexpr int64_t per = VECTOR_BYTES / sizeof(T);

template <class T> INLINE R<T> load_r(const T* from) { R<T> x; memcpy(&x, from, sizeof x); return x; }
template <class T> INLINE void store_r(T* to, R<T> x) { memcpy(to, &x, sizeof x); }

// Elements are processed in pairs of registers: two chains of operations at a time keep a processor busier than one.
template <class X> struct Pair { X a, b; };
template <class T> using V = Pair<R<T>>;
template <class T> using I = Pair<Bits<T>>;
template <class T> constexpr int64_t lanes = 2 * per<T>;

#define FOR_PAIRS(operation)                                                                                                  \
    template <class X> INLINE Pair<X> operator operation(Pair<X> x, Pair<X> y) { return {x.a operation y.a, x.b operation y.b}; } \
    template <class X, class Y> INLINE Pair<X> operator operation(Pair<X> x, Y y) { return {x.a operation y, x.b operation y}; }
FOR_PAIRS(+)
FOR_PAIRS(-)
FOR_PAIRS(*)
FOR_PAIRS(&)
FOR_PAIRS(<<)
FOR_PAIRS(>>)
#undef FOR_PAIRS
template <class X> INLINE Pair<X> operator/(Pair<X> x, Pair<X> y) { return {x.a / y.a, x.b / y.b}; }
template <class X> INLINE Pair<X>& operator+=(Pair<X>& x, Pair<X> y) { return x = x + y; }

template <class T> INLINE V<T> load(const T* from) { return {load_r(from), load_r(from + per<T>)}; }
template <class T> INLINE void store(T* to, V<T> x) { store_r<T>(to, x.a), store_r<T>(to + per<T>, x.b); }
template <class T> INLINE void store(typename Lanes<T>::Int* to, I<T> x) {
    memcpy(to, &x.a, sizeof x.a), memcpy(to + per<T>, &x.b, sizeof x.b);
}
template <class T> INLINE V<T> splat(T x) { return {x - R<T>{}, x - R<T>{}}; }
template <class T> INLINE I<T> bits(V<T> x) { I<T> i; memcpy(&i, &x, sizeof i); return i; }
template <class T> INLINE V<T> from_bits(I<T> i) { V<T> x; memcpy(&x, &i, sizeof x); return x; }
template <class T> INLINE I<T> below(V<T> x, T y) { return {x.a < y, x.b < y}; }
template <class T> INLINE I<T> equal(V<T> x, T y) { return {x.a == y, x.b == y}; }
template <class T> INLINE V<T> choose(I<T> which, V<T> yes, V<T> no) { return {which.a ? yes.a : no.a, which.b ? yes.b : no.b}; }
template <class T> INLINE V<T> where(I<T> which, V<T> x) { return from_bits<T>(bits<T>(x) & which); }
template <class T> INLINE V<T> except(I<T> which, V<T> x) { return {which.a ? R<T>{} : x.a, which.b ? R<T>{} : x.b}; }
template <class T> INLINE V<T> absolute(V<T> x) {
    return from_bits<T>(bits<T>(x) & std::numeric_limits<typename Lanes<T>::Int>::max());
}
// The larger and the smaller of two; y where one of them is NaN.
template <class T> INLINE V<T> larger(V<T> x, V<T> y) { return {x.a > y.a ? x.a : y.a, x.b > y.b ? x.b : y.b}; }
template <class T> INLINE V<T> smaller(V<T> x, V<T> y) { return {x.a < y.a ? x.a : y.a, x.b < y.b ? x.b : y.b}; }
// Where x is 0 or subnormal.
template <class T> INLINE I<T> tiny(V<T> x) { return below<T>(absolute<T>(x), std::numeric_limits<T>::min()); }

// The lanes rotated by BY.
template <class T, int BY, size_t... i> INLINE R<T> rotated(R<T> x, std::index_sequence<i...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, x, (i + BY) % per<T>...);
#else
    return __builtin_shuffle(x, Bits<T>{typename Lanes<T>::Int((i + BY) % per<T>)...});
#endif
}
template <class T, int BY> INLINE R<T> rotated(R<T> x) { return rotated<T, BY>(x, std::make_index_sequence<per<T>>()); }

template <class T, int BY = per<T> / 2> INLINE T sum(R<T> x) {
    if constexpr (BY == 0) return x[0];
    else return sum<T, BY / 2>(x + rotated<T, BY>(x));
}
template <class T> INLINE T sum(V<T> x) { return sum<T>(x.a + x.b); }
template <class T, int BY = per<T> / 2> INLINE T largest(R<T> x) {
    if constexpr (BY == 0) return x[0];
    else {
        const R<T> other = rotated<T, BY>(x);
        return largest<T, BY / 2>(x > other ? x : other);
    }
}
template <class T> INLINE T largest(V<T> x) { return largest<T>(x.a > x.b ? x.a : x.b); }

// log2|x| = E + F, FLOOR + F for 0; F is NaN where x is not finite.
template <class T> INLINE void split_log2(V<T> x, V<T>& E, V<T>& F) {
    using L = Lanes<T>;
    const V<T> magnitude = absolute<T>(x);
    const I<T> tiny = below<T>(magnitude, std::numeric_limits<T>::min());
    const V<T> scaled = choose<T>(tiny, magnitude * T(int64_t(1) << L::rescale), magnitude);
    const I<T> whole = (bits<T>(scaled) - L::root_half) >> L::mantissa;
    const V<T> m = from_bits<T>(bits<T>(scaled) - (whole << L::mantissa));  // sqrt(1/2) to sqrt(2)
    E = V<T>{__builtin_convertvector(whole.a, R<T>), __builtin_convertvector(whole.b, R<T>)} - where<T>(tiny, splat<T>(L::rescale));
    E = choose<T>(equal<T>(magnitude, T(0)), splat<T>(T(FLOOR)), E);
    if constexpr (sizeof(T) == 4) {
        // log2(1 + t) / t on the interval of m - 1, interpolated at Chebyshev points: error at most 5e-8 in float.
        constexpr float c[] = {1.4426950035679824f,   -0.7213474682495813f, 0.48091075345941814f,
                               -0.36069326813363906f, 0.28790326092260615f, -0.23916988144018123f,
                               0.21607822558509354f,  -0.2058618802530109f, 0.12310968416081866f};
        const V<T> t = m - T(1), t2 = t * t, t4 = t2 * t2;
        const V<T> low = (t * c[1] + c[0]) + t2 * (t * c[3] + c[2]), high = (t * c[5] + c[4]) + t2 * (t * c[7] + c[6]);
        F = t * (low + t4 * (high + t4 * c[8])) + (magnitude - magnitude);
    } else {
        const V<T> s = (m - T(1)) / (m + T(1)), s2 = s * s;  // log m = 2 artanh s, |s| <= 0.172
        V<T> series = splat<T>(T(1.0 / 25));
        for (int n = 23; n >= 3; n -= 2) series = series * s2 + T(1.0 / n);
        const V<T> a = s * T(2.885390081777926814719849362);  // 2 / ln 2
        F = a * s2 * series + a + (magnitude - magnitude);
    }
}

// 2^y; 0 below the normal range, infinity above it; NaN is kept.
template <class T> INLINE V<T> exp2(V<T> y) {
    using L = Lanes<T>;
    // At these limits the exponent bits of the result are all 0 or all 1: the number is 0 or infinity.
    const V<T> z = smaller<T>(splat<T>(T(L::bias + 1)), larger<T>(splat<T>(T(-L::bias)), y));
    const V<T> moved = z + T(L::magic);
    const V<T> f = z - (moved - T(L::magic));  // |f| <= 1/2
    const I<T> n = bits<T>(moved) - bits<T>(splat<T>(T(L::magic)));
    V<T> e;
    if constexpr (sizeof(T) == 4) {  // interpolated at Chebyshev points: error at most 3e-9
        constexpr float c[] = {1.0f,
                               0.6931472067028329f,
                               0.24022650922289554f,
                               0.05550327226669895f,
                               0.00961805667843204f,
                               0.0013400428177711937f,
                               0.00015461444724808513f};
        const V<T> f2 = f * f;
        e = (f * c[1] + c[0]) + f2 * ((f * c[3] + c[2]) + f2 * ((f * c[5] + c[4]) + f2 * c[6]));
    } else {
        constexpr double inverse_factorials[] = {1.0,          1.0,           1.0 / 2,         1.0 / 6,          1.0 / 24,
                                                 1.0 / 120,    1.0 / 720,     1.0 / 5040,      1.0 / 40320,      1.0 / 362880,
                                                 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800, 1.0 / 87178291200};
        const V<T> x = f * T(0.6931471805599453094);
        e = splat<T>(T(inverse_factorials[14]));
        for (int i = 13; i >= 0; i--) e = e * x + T(inverse_factorials[i]);
    }
    return e * from_bits<T>((n + L::bias) << L::mantissa);
}

template <class T> INLINE V<T> nearest_whole(V<T> x) {  // of |x| < 2^22
    return (x + T(Lanes<T>::magic)) - T(Lanes<T>::magic);
}

// ---- memory ----

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory, handed out piece by piece. Each thread keeps a block between calls (KEPT): requesting it from the system again costs
// more than a small problem takes. `poison` fills it with NaN, for tests.
class Arena {
  public:
    enum Kind { OWN, KEPT };
    Arena(Kind kind, size_t bytes, bool poison) : owned(kind == OWN) {
        static thread_local Kept kept;
        const size_t size = round_up(bytes, 4096);
        if (owned || kept.size < size) {
            data = static_cast<char*>(aligned_alloc(4096, size));
            if (!data) throw std::bad_alloc();
        }
        if (!owned && kept.size < size) {
            free(kept.data);
            kept.data = data;
            kept.size = size;
        }
        if (!owned) data = kept.data;
        if (poison) memset(data, 0xff, size);
    }
    ~Arena() {
        if (owned) free(data);
    }
    Arena(const Arena&) = delete;
    template <class T> T* take(int64_t count) {
        T* result = reinterpret_cast<T*>(data + used);
        used += round_up(count * sizeof(T), 64);
        return result;
    }

  private:
    struct Kept {
        char* data = nullptr;
        size_t size = 0;
        ~Kept() { free(data); }
    };
    const bool owned;
    char* data = nullptr;
    size_t used = 0;
};

inline float widen_bfloat16(uint16_t x) {
    const uint32_t wide = uint32_t(x) << 16;
    float result;
    memcpy(&result, &wide, 4);
    return result;
}
inline uint16_t narrow_bfloat16(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if ((wide & 0x7fffffff) > 0x7f800000) return uint16_t(wide >> 16 | 0x40);  // NaN
    return uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

template <class T> void widen(const void* data, int64_t offset, int64_t storage, int64_t count, T* to) {
    if (storage == BFLOAT16) {
        const uint16_t* from = static_cast<const uint16_t*>(data) + offset;
        for (int64_t i = 0; i < count; i++) to[i] = widen_bfloat16(from[i]);
#if defined(__FLT16_MAX__)
    } else if (storage == FLOAT16) {
        const _Float16* from = static_cast<const _Float16*>(data) + offset;
        for (int64_t i = 0; i < count; i++) to[i] = from[i];
#endif
    } else {
        memcpy(to, static_cast<const T*>(data) + offset, count * sizeof(T));
    }
}
template <class T> void narrow(const T* from, int64_t count, void* data, int64_t offset, int64_t storage) {
    if (storage == BFLOAT16) {
        uint16_t* to = static_cast<uint16_t*>(data) + offset;
        for (int64_t i = 0; i < count; i++) to[i] = narrow_bfloat16(from[i]);
#if defined(__FLT16_MAX__)
    } else if (storage == FLOAT16) {
        _Float16* to = static_cast<_Float16*>(data) + offset;
        for (int64_t i = 0; i < count; i++) to[i] = _Float16(from[i]);
#endif
    } else {
        memcpy(static_cast<T*>(data) + offset, from, count * sizeof(T));
    }
}

// Request large pages for a large new result: the system clears and maps them many times faster than small ones.
inline void prefer_large_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr int64_t page = 4096, large = 8 << 20;
    const int64_t begin = round_up(reinterpret_cast<int64_t>(data), page);
    if (data && bytes >= large) madvise(reinterpret_cast<void*>(begin), (bytes - page) / page * page, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

inline int64_t thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

}  // namespace

extern "C" {

// The vector width that this was compiled for.
int vector_bytes() { return VECTOR_BYTES; }

// Whether the compiler supported OpenMP.
int has_threads() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// Whether it supported IEEE 16-bit floating-point numbers.
int has_float16() {
#if defined(__FLT16_MAX__)
    return 1;
#else
    return 0;
#endif
}
}
