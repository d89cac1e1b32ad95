// The passes of ops/functions.py for CPUs, over a table of parameters: one call is one pass over a
// whole batch. The interface is C without torch headers, so it works with any version of torch.
//
// A pass reads a run in chunks; its inputs and temporaries stay in the cache. Loops are plain, for
// the compiler to vectorize. Sums use LANES partial sums on every processor, and a run's geometry
// (shape, start and length) determines its strips. Bits therefore depend neither on the machine's
// vector width, nor on threads, nor on other parameters in the table.
//
// The body below is compiled once per instruction set, by including this file again.

#ifndef DS_EXT_BODY
#define DS_EXT_BODY

// Sanitizer builds define DS_EXT_PLAIN: one body is enough, and compiles in a third of the time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DS_EXT_PLAIN)
#define DS_EXT_VECTORS
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <unistd.h>
#include <vector>

#include "schema.h"  // an Entry is one parameter, by the columns of ops/schema.py

// Entry.norm_cache holds the sum of squares of the weights as last written, negative if not cached,
// and PROBES of these weights: if one has changed, the weights were edited since.

namespace {

const int WIDTH = 16, LANES = 4 * WIDTH;
const size_t ALIGNED = 64;  // bytes of the widest vectors, so that none crosses a cache line
typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
const int64_t CHUNK = 512;       // elements processed at a time
const int64_t AHEAD = 4096;      // prefetch distance, bytes
const int64_t FEW_LINES = 128;   // elements prefetched at a time in loops that do little else
const int64_t STRIP = 1 << 17;   // elements that a thread takes at a time, roughly
const int64_t TALL = 724;        // rows added up at a time, √2¹⁹: two sums in fp32 then lose the fewest digits

// Runs ``function(data)`` on torch's threads, if torch has loaded an OpenMP runtime; else null. Threads
// of our own would compete with torch's, which spin for a while after each of torch's operations.
extern "C" __attribute__((weak, visibility("default"))) void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);

// The process that has imported ds_ext. A forked one lacks its threads, for which OpenMP would wait.
extern "C" __attribute__((visibility("default"))) int process_with_threads = 0;

// Orders what threads write, for a sanitizer that does not know the runtime's barriers.
std::atomic<unsigned> handed_over{0};

// The tasks of a call. Threads take them one after another.
template <class Task> struct Job {
    const Task &task;
    const int64_t tasks;
    std::fenv_t modes;  // the caller's, which torch.set_flush_denormal() may have changed
    std::atomic<int64_t> next{0};

    void work() {
        for (int64_t i; (i = next.fetch_add(1)) < tasks;) task(i);
    }
    static void run(void *data) {
        Job &job = *static_cast<Job *>(data);
        ++handed_over;
        std::fenv_t own;
        std::fegetenv(&own);
        std::fesetenv(&job.modes);
        job.work();
        std::fesetenv(&own);
        ++handed_over;
    }
};

template <class Task> void parallel(int64_t tasks, int threads, const Task &task) {
    Job<Task> job{task, tasks, {}};
    if (threads < 2 || tasks < 2 || !GOMP_parallel || getpid() != process_with_threads) return job.work();
    std::fegetenv(&job.modes);
    ++handed_over;
    GOMP_parallel(Job<Task>::run, &job, static_cast<unsigned>(threads), 0);  // fewer threads would end the others
    ++handed_over;
}

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// rounding.hash_
inline uint32_t hashed(uint32_t x) {
    x = (x ^ (x >> 16)) * LOWBIAS1;
    x = (x ^ (x >> 15)) * LOWBIAS2;
    return x ^ (x >> 16);
}

// rounding._noise: a permutation of the numbers below NOISE_CHUNK, twice, so that reads may run past its
// end. It stays in the cache, so reading it is faster than computing it.
const uint16_t *permutation() {
    static const std::vector<uint16_t> made = [] {
        std::vector<uint16_t> table(2 * NOISE_CHUNK);
        for (size_t k = 0; k < table.size(); ++k) {
            uint32_t h = k % NOISE_CHUNK;
            h = (h ^ (h >> 7)) * NOISE1 & 0xFFFFu;
            h = (h ^ (h >> 5)) * NOISE2 & 0xFFFFu;
            h = (h ^ (h >> 9)) * NOISE3 & 0xFFFFu;
            table[k] = static_cast<uint16_t>(h ^ (h >> 10));
        }
        return table;
    }();
    return made.data();
}

struct alignas(ALIGNED) Aligned {
    float lane[WIDTH];
};

// Elements [begin, end) of a run.
struct Strip {
    int64_t entry, begin, end;
    int64_t partial;  // offset of its partial sums
};

bool is_by_matrix(const Call &call) {
    return call.pass == ROW_COL_SUMS || call.pass == WEIGHTED_SUMS;
}

// Whether each strip of row and column sums lies in one matrix, and has column sums of its own.
bool is_large(const Entry &e) { return e.rows * e.cols > STRIP || e.rows > TALL; }

// Cuts a run into strips. For row and column sums, strips have whole rows, and whole matrices if
// these are small. Strips have the same size, except the first and last of a run and the last of
// each large matrix.
void cut(const Entry &e, int64_t number, bool by_matrix, std::vector<Strip> &strips) {
    int64_t whole = by_matrix ? e.rows * e.cols : 0, size = STRIP;
    bool is_one = by_matrix && is_large(e);
    if (whole > 0) size = is_one ? std::clamp<int64_t>(STRIP / e.cols, 1, TALL) * e.cols : STRIP / whole * whole;
    for (int64_t at = e.start, stop = e.start + e.n, next; at < stop; at = next) {
        int64_t base = is_one ? at / whole * whole : by_matrix ? 0 : e.start;
        next = base + ((at - base) / size + 1) * size;
        if (is_one && next > base + whole) next = base + whole;
        if (next > stop) next = stop;
        strips.push_back({number, at - e.start, next - e.start, 0});
    }
}

typedef void (*Runner)(const Call &, Entry *, int64_t, int);

}  // namespace

#ifdef DS_EXT_VECTORS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define ISA v4
#include "passes.cpp"
#undef ISA
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define ISA v3
#include "passes.cpp"
#undef ISA
#pragma GCC pop_options
#endif
#define ISA plain
#include "passes.cpp"
#undef ISA

static Runner chosen() {
#ifdef DS_EXT_VECTORS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512cd"))
        return v4::run;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return v3::run;
#endif
    return plain::run;
}

extern "C" __attribute__((visibility("default"))) int64_t passes_entry_bytes() { return sizeof(Entry); }

// Makes a pass over ``entries``. isa 0 is the processor's best instruction set, 1 the baseline.
extern "C" __attribute__((visibility("default"))) void passes_run(const Call *call, Entry *entries, int64_t n, int threads, int isa) {
    static const Runner best = chosen();
    (isa ? plain::run : best)(*call, entries, n, threads);
}

#else  // the body, for one instruction set

namespace ISA {

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

INLINE float half_to_float(uint16_t h) {
    uint32_t body = static_cast<uint32_t>(h & 0x7FFF) << 13, sign = static_cast<uint32_t>(h & 0x8000) << 16;
    float small = as_float(body + 0x38800000u) - as_float(0x38800000u);
    uint32_t bits = body < 0x00800000u ? as_bits(small) : body + 0x38000000u;
    bits = body >= 0x0F800000u ? body + 0x70000000u : bits;
    return as_float(bits | sign);
}

INLINE uint16_t float_to_half(float x) {
    uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000u, a = bits & 0x7FFFFFFFu;
    uint32_t small = as_bits(as_float(a) + 0.5f) - 0x3F000000u;
    uint32_t normal = (a + 0xC8000FFFu + ((a >> 13) & 1u)) >> 13;
    uint32_t h = a < 0x38800000u ? small : normal;
    h = a >= 0x477FF000u ? 0x7C00u : h;
    h = a > 0x7F800000u ? 0x7E00u : h;
    return static_cast<uint16_t>(h | sign);
}

INLINE float bf16_to_float(uint16_t b) { return as_float(static_cast<uint32_t>(b) << 16); }

INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits = as_bits(x);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// Prefetches n elements, AHEAD bytes after ``from``. When a loop alternates between several runs, the
// hardware prefetcher stalls at the beginning of each chunk.
template <class T> INLINE void prefetch(const T *from, int64_t n) {
    const char *at = reinterpret_cast<const char *>(from) + AHEAD;
    for (int64_t k = 0; k < n * static_cast<int64_t>(sizeof(T)); k += 64) __builtin_prefetch(at + k);
}

// Reads WIDTH numbers as one vector.
template <class X> INLINE void read_each(const X &x, int64_t j, Vector &to) {
    float lane[WIDTH];
    for (int l = 0; l < WIDTH; ++l) lane[l] = x[j + l];
    std::memcpy(&to, lane, sizeof to);
}

// Stored numbers, which the reading loop converts to fp32.
struct Fp32 {
    const float *at;
    Fp32 from(int64_t i) const { return {at + i}; }
    void prefetch(int64_t n) const { ISA::prefetch(at, n); }
    INLINE_MEMBER float operator[](int64_t j) const { return at[j]; }
    INLINE_MEMBER void read(int64_t j, Vector &x) const { std::memcpy(&x, at + j, sizeof x); }
};

// IS_BF16: else fp16.
template <bool IS_BF16> struct Narrow {
    const uint16_t *at;
    Narrow from(int64_t i) const { return {at + i}; }
    void prefetch(int64_t n) const { ISA::prefetch(at, n); }
    INLINE_MEMBER float operator[](int64_t j) const { return IS_BF16 ? bf16_to_float(at[j]) : half_to_float(at[j]); }
    INLINE_MEMBER void read(int64_t j, Vector &x) const {
        if constexpr (!IS_BF16) return read_each(*this, j, x);
        Halves halves;
        std::memcpy(&halves, at + j, sizeof halves);
        Bits bits = __builtin_convertvector(halves, Bits) << 16;
        std::memcpy(&x, &bits, sizeof x);
    }
};
typedef Narrow<true> Bf16;
typedef Narrow<false> Fp16;

// Stored numbers times a factor, clamped to ± bound.
template <class X> struct Scaled {
    X x;
    float factor, bound;
    Scaled from(int64_t i) const { return {x.from(i), factor, bound}; }
    void prefetch(int64_t n) const { x.prefetch(n); }
    INLINE_MEMBER float operator[](int64_t j) const {
        float u = x[j] * factor;
        u = u > bound ? bound : u;
        return u < -bound ? -bound : u;  // NaN stays NaN
    }
    INLINE_MEMBER void read(int64_t j, Vector &to) const { read_each(*this, j, to); }
};

// Rounds fp32 numbers to 16 bits, to nearest.
INLINE void round_all(const float *__restrict x, int64_t n, uint16_t *__restrict w, bool is_bf16) {
    if (is_bf16)
        for (int64_t j = 0; j < n; ++j) w[j] = float_to_bf16(x[j]);
    else
        for (int64_t j = 0; j < n; ++j) w[j] = float_to_half(x[j]);
}

// sixteen_bit.CorrectedWeight for a dtype with ``epsilon`` and the smallest normal number ``least``.
struct Correction {
    float epsilon;
    uint32_t least;

    // The bits of the power of two below a weight.
    uint32_t power(float near) const {
        uint32_t bits = as_bits(near) & 0x7F800000u;
        bits = bits < least ? least : bits;
        return bits > 0x7F000000u ? 0x7F000000u : bits;
    }

    float read(float near, int8_t parts) const {
        uint32_t size = as_bits(near) & 0x7FFFFFFFu;
        bool is_power = (size & 0x007FFFFFu) == 0 && size > least;
        float inward = is_power ? MAX_INWARD_CODE : MAX_ERROR_CODE;
        float low = near < 0 ? -MAX_ERROR_CODE : -inward, high = near < 0 ? inward : MAX_ERROR_CODE;
        float x = parts;
        x = x > high ? high : (x < low ? low : x);
        return x * (epsilon / (2.0f * ERROR_LEVELS)) * as_float(power(near)) + near;
    }

    int8_t parts_of(float x, float near) const {
        float parts = (x - near) * as_float(0x7F800000u - power(near)) * (ERROR_LEVELS / epsilon);
        parts = parts < 0.0f ? parts - HALF : parts + HALF;
        parts = (as_bits(near) & 0x7F800000u) == 0x7F800000u ? 0.0f : parts;  // not finite
        return static_cast<int8_t>(static_cast<int32_t>(parts));
    }
};

INLINE Correction correction(bool is_bf16) {
    return is_bf16 ? Correction{0x1p-7f, 0x00800000u} : Correction{0x1p-10f, 0x38800000u};
}

// Returns numbers as fp32: in place, or a copy in ``buffer``.
template <class X> INLINE const float *copied(const X &x, int64_t n, float *__restrict buffer) {
    x.prefetch(n);
    if constexpr (std::is_same_v<X, Fp32>) return x.at;
    for (int64_t j = 0; j < n; ++j) buffer[j] = x[j];
    return buffer;
}

static const float *loaded(const void *x, int dtype, int64_t i, int64_t n, float *__restrict buffer) {
    const uint16_t *narrow = static_cast<const uint16_t *>(x) + i;
    if (dtype == FP32) return copied(Fp32{static_cast<const float *>(x) + i}, n, buffer);
    return dtype == BF16 ? copied(Bf16{narrow}, n, buffer) : copied(Fp16{narrow}, n, buffer);
}

// Calls ``task`` with the gradient from element i on: x · factor clamped to ± bound.
template <class Task> INLINE void with_gradient(const Entry &e, int dtype, int64_t i, const Task &task) {
    const float *wide = static_cast<const float *>(e.x) + i;
    const uint16_t *narrow = static_cast<const uint16_t *>(e.x) + i;
    bool is_plain = e.factor == 1.0f && std::isinf(e.bound);
    switch (dtype) {
    case FP32: is_plain ? task(Fp32{wide}) : task(Scaled<Fp32>{{wide}, e.factor, e.bound}); break;
    case BF16: is_plain ? task(Bf16{narrow}) : task(Scaled<Bf16>{{narrow}, e.factor, e.bound}); break;
    default: task(Scaled<Fp16>{{narrow}, e.factor, e.bound}); break;
    }
}

// Returns the gradient as fp32: in place, or a copy in ``buffer``.
static __attribute__((noinline)) const float *gradient(const Entry &e, int dtype, int64_t i, int64_t n, float *__restrict buffer) {
    const float *found = nullptr;
    with_gradient(e, dtype, i, [&](auto x) { found = copied(x, n, buffer); });
    return found;
}

static __attribute__((noinline)) const float *weight(const Entry &e, int storage, int64_t i, int64_t n, float *__restrict buffer) {
    switch (storage) {
    case PLAIN_FP32: return loaded(e.w, FP32, i, n, buffer);
    case PLAIN_BF16:
    case STOCHASTIC_BF16: return loaded(e.w, BF16, i, n, buffer);
    case PLAIN_FP16:
    case STOCHASTIC_FP16: return loaded(e.w, FP16, i, n, buffer);
    case SPLIT_BF16: {
        const uint16_t *__restrict w = static_cast<const uint16_t *>(e.w) + i;
        const int16_t *__restrict rest = static_cast<const int16_t *>(e.aux) + i;
        for (int64_t j = 0; j < n; ++j) {
            uint32_t near = static_cast<uint32_t>(w[j]) << 16;
            uint32_t sum = near + static_cast<uint32_t>(static_cast<int32_t>(rest[j]));
            buffer[j] = as_float((sum & 0x7FFFFFFFu) > 0x7F800000u ? near : sum);  // NaN: an edited 0 or inf
        }
        return buffer;
    }
    case CORRECTED_BF16:
    case CORRECTED_FP16: {
        bool is_bf16 = storage == CORRECTED_BF16;
        const Correction c = correction(is_bf16);
        const int8_t *__restrict parts = static_cast<const int8_t *>(e.aux) + i;
        loaded(e.w, is_bf16 ? BF16 : FP16, i, n, buffer);
        prefetch(parts, n);
        for (int64_t j = 0; j < n; ++j) buffer[j] = c.read(buffer[j], parts[j]);
        return buffer;
    }
    default: {  // COPIED_FP16: uses the copy while it still rounds to the run's weight
        const uint16_t *__restrict w = static_cast<const uint16_t *>(e.w) + i;
        const float *__restrict copy = static_cast<const float *>(e.aux) + i;
        for (int64_t j = 0; j < n; ++j) {
            float now = half_to_float(w[j]), then = half_to_float(float_to_half(copy[j]));
            buffer[j] = then == now ? copy[j] : now;
        }
        return buffer;
    }
    }
}

// rounding.add_noise_: 16 random bits for each of n elements, from element ``at`` on, before flips(). Returns
// a pointer into the permutation, or a copy in ``buffer`` if the elements cross two chunks.
static const uint16_t *noise(uint32_t key, int64_t at, int64_t n, uint16_t *__restrict buffer) {
    const uint16_t *table = permutation();
    for (int64_t j = 0; j < n;) {
        int64_t chunk = (at + j) / NOISE_CHUNK, element = (at + j) % NOISE_CHUNK;
        int64_t stop = j + NOISE_CHUNK - element;
        uint32_t place = hashed(key + static_cast<uint32_t>(chunk) * PRIME3);
        const uint16_t *from = table + (place + static_cast<uint32_t>(element)) % NOISE_CHUNK;
        if (j == 0 && stop >= n) return from;
        if (stop > n) stop = n;
        std::memcpy(buffer + j, from, sizeof(uint16_t) * static_cast<size_t>(stop - j));
        j = stop;
    }
    return buffer;
}

// The bits that a step flips in them.
static uint32_t flips(uint64_t key) { return static_cast<uint32_t>(key >> 32); }

// Rounds numbers that may exceed the largest bf16, which they become, or may be non-finite.
static __attribute__((noinline)) void round_odd(const float *x, const uint16_t *random, uint32_t flipped, int64_t n,
                                                uint16_t *w) {
    for (int64_t j = 0; j < n; ++j) {
        uint32_t bits = as_bits(x[j]), a = bits & 0x7FFFFFFFu, sign = bits & 0x80000000u;
        uint32_t within = a > 0x7F7F0000u ? 0x7F7F0000u : a;
        uint32_t rounded = ((within + (random[j] ^ flipped)) & 0xFFFF0000u) | sign;
        uint32_t special = a > 0x7F800000u ? 0x7FC00000u : bits;
        w[j] = static_cast<uint16_t>((a >= 0x7F800000u ? special : rounded) >> 16);
    }
}

// Writes ``x`` to the weight from element i on, in a format that step_at_once() does not take, and replaces
// ``x`` with the stored values.
static __attribute__((noinline)) void store(const Entry &e, int storage, int64_t i, int64_t n, float *__restrict x) {
    uint16_t *__restrict w = static_cast<uint16_t *>(e.w) + i;
    alignas(ALIGNED) uint16_t drawn[CHUNK];
    switch (storage) {
    case PLAIN_FP16:
        round_all(x, n, w, false);
        loaded(e.w, FP16, i, n, x);
        break;
    case STOCHASTIC_FP16: {
        const uint16_t *random = noise(static_cast<uint32_t>(e.key), e.origin + i, n, drawn);
        const uint32_t flipped = flips(e.key);
        for (int64_t j = 0; j < n; ++j) {
            uint32_t a = as_bits(x[j]) & 0x7FFFFFFFu;
            float most = 65504.0f, bounded = x[j] > most ? most : x[j];
            bounded = bounded < -most ? -most : bounded;
            bounded = a >= 0x7F800000u ? 0.0f : bounded;
            float power = as_float(as_bits(bounded) & 0x7F800000u);
            float spacing = (power < 0x1p-14f ? 0x1p-14f : power) * 0x1p-10f;
            float steps = bounded / spacing;
            int32_t whole = static_cast<int32_t>(steps);  // below 2**11
            float cut = std::fabs(steps - static_cast<float>(whole));
            int32_t more = static_cast<int32_t>(cut * -65536.0f) + static_cast<int32_t>(random[j] ^ flipped);
            float further = more < 0 ? (steps < 0 ? -1.0f : 1.0f) : 0.0f;
            float rounded = (static_cast<float>(whole) + further) * spacing;
            rounded = as_float(as_bits(rounded) | (as_bits(bounded) & 0x80000000u));
            x[j] = a >= 0x7F800000u ? x[j] : rounded;
            w[j] = float_to_half(x[j]);
        }
        break;
    }
    case SPLIT_BF16: {
        int16_t *__restrict rest = static_cast<int16_t *>(e.aux) + i;
        for (int64_t j = 0; j < n; ++j) {
            uint32_t bits = as_bits(x[j]);
            bits = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits;
            rest[j] = static_cast<int16_t>(bits);
            w[j] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
            x[j] = as_float(bits);
        }
        break;
    }
    case CORRECTED_BF16:
    case CORRECTED_FP16: {
        bool is_bf16 = storage == CORRECTED_BF16;
        const Correction c = correction(is_bf16);
        int8_t *__restrict parts = static_cast<int8_t *>(e.aux) + i;
        float near[CHUNK];
        round_all(x, n, w, is_bf16);
        loaded(e.w, is_bf16 ? BF16 : FP16, i, n, near);
        for (int64_t j = 0; j < n; ++j) parts[j] = c.parts_of(x[j], near[j]);
        for (int64_t j = 0; j < n; ++j) x[j] = c.read(near[j], parts[j]);
        break;
    }
    default: {  // COPIED_FP16
        float *__restrict copy = static_cast<float *>(e.aux) + i;
        for (int64_t j = 0; j < n; ++j) {
            copy[j] = x[j];
            w[j] = float_to_half(x[j]);
        }
        break;
    }
    }
}

#ifdef __clang__
#define SHUFFLED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLED(v, ...) __builtin_shuffle(v, Bits{__VA_ARGS__})
#endif

// The sum of a vector: adds its second half to its first, then the second quarter, and so on.
INLINE float sum_of(Vector v) {
    v += SHUFFLED(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLED(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += SHUFFLED(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v += SHUFFLED(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return v[0];
}

#undef SHUFFLED

// The sum of squares of up to CHUNK numbers, in LANES partial sums. Each number is read once.
template <class X> static __attribute__((noinline)) double square_sum_of(X x, int64_t n) {
    Vector sum[LANES / WIDTH] = {};
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int k = 0; k < LANES / WIDTH; ++k) {
            Vector v;
            x.read(j + k * WIDTH, v);
            sum[k] += v * v;
        }
    Vector rest;
    for (; j + WIDTH <= n; j += WIDTH) {
        x.read(j, rest);
        sum[0] += rest * rest;
    }
    rest = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    if (j < n) {
        float lane[WIDTH] = {};
        for (int l = 0; j + l < n; ++l) {
            float v = x[j + l];
            lane[l] = v * v;
        }
        Vector last;
        std::memcpy(&last, lane, sizeof last);
        rest = last + rest;
    }
    return sum_of(rest);
}

INLINE double square_sum(const float *x, int64_t n) { return square_sum_of(Fp32{x}, n); }

// The largest factor: reference.LARGEST.
const float MAX_FACTOR = 1e18f;

// 1 / sqrt(v), at most MAX_FACTOR; 0 where v is 0, as then the input is.
INLINE float inverse_root(float v) {
    float found = 1.0f / std::sqrt(v);
    found = found > MAX_FACTOR ? MAX_FACTOR : found;
    return v == 0.0f ? 0.0f : found;
}

// m / divisor; 0 if the divisor is 0.
INLINE float divided(float m, float divisor) { return divisor == 0.0f ? 0.0f : m / divisor; }

// Returns m + weight · (x − m), rounded like moments.moved.
INLINE float moved(float m, float x, float weight) {
    float change = x - m;
    return weight < 0.5f ? m + weight * change : x - (1.0f - weight) * change;
}

// u ← x · row · col · scale for n elements of the run, from element i on.
template <class X> static __attribute__((noinline)) void times_factors(const Entry &e, int64_t i, int64_t n, X x, float *__restrict u) {
    int64_t line = (e.start + i) / e.cols, c = (e.start + i) % e.cols, mat = line / e.rows;
    for (int64_t j = 0, last = (mat + 1) * e.rows; j < n; c = 0) {
        int64_t stop = j + e.cols - c < n ? j + e.cols - c : n;
        float r = e.row[line] * e.scale;
        const float *f = e.col + mat * e.cols + c - j;
        for (int64_t k = j; k < stop; ++k) u[k] = x[k] * (f[k] * r);
        j = stop;
        if (++line == last) ++mat, last += e.rows;
    }
}

INLINE float within(float low, float x, float high) {
    x = x > low ? x : low;  // two steps of one instruction each
    return x < high ? x : high;
}

// 8-bit moments: companding.py. A chunk has whole groups, except for the last group of a parameter.

INLINE float scale_of(uint16_t code) { return as_float((code + SCALE_FIRST) << SCALE_CUT); }

INLINE uint16_t code_of(float scale) {
    uint32_t bits = as_bits(scale);
    return static_cast<uint16_t>(((bits + ((1u << (SCALE_CUT - 1)) - 1) + ((bits >> SCALE_CUT) & 1u)) >> SCALE_CUT) - SCALE_FIRST);
}

// The nearest integer, ties to even, in the low bits, for |x| below 2^22.
INLINE uint32_t rounded(float x) { return as_bits(x + 12582912.0f); }

// The scale of a group: its largest magnitude, clamped.
INLINE float largest_of(const float *x, int64_t n, float least) {
    uint32_t most = 0;  // an integer maximum, which the compiler may reorder
    for (int64_t k = 0; k < n; ++k) {
        uint32_t a = as_bits(x[k]) & 0x7FFFFFFFu;
        most = a > most ? a : most;
    }
    return within(least, as_float(most), MAX_SCALE);
}

// Calls ``task(j, size)`` for each group of n elements. ``size`` is a constant but for the last one.
template <class Task> INLINE void each_group(int64_t n, const Task &task) {
    int64_t j = 0;
    for (; j + SCALE_GROUP <= n; j += SCALE_GROUP) task(j, std::integral_constant<int64_t, SCALE_GROUP>());
    if (j < n) task(j, n - j);
}

static __attribute__((noinline)) void read_signed(const Entry &e, int64_t i, int64_t n, float *__restrict m) {
    const int8_t *code = reinterpret_cast<const int8_t *>(e.m) + i;
    prefetch(code, n);
    each_group(n, [&](int64_t first, auto size) {
        float scale = scale_of(e.m_scale[(i + first) / SCALE_GROUP]);
        for (int64_t j = first; j < first + size; ++j) {
            float c = static_cast<float>(code[j]);
            m[j] = c / (254.0f - std::fabs(c)) * scale;
        }
    });
}

static __attribute__((noinline)) void read_squares(const Entry &e, int64_t i, int64_t n, float *__restrict v) {
    const uint8_t *code = reinterpret_cast<const uint8_t *>(e.v) + i;
    prefetch(code, n);
    each_group(n, [&](int64_t first, auto size) {
        float step = scale_of(e.v_scale[(i + first) / SCALE_GROUP]) / 255.0f;
        for (int64_t j = first; j < first + size; ++j) {
            float root = static_cast<float>(code[j]) * step;
            v[j] = root * root;
        }
    });
}

// Writes numbers as codes, ``encoded(x, 1 / scale)`` of each, and their scales, which are at least ``least``.
template <class Code, class Encoded> INLINE void write_groups(const float *x, int64_t n, float least, Code *__restrict code, uint16_t *scale, const Encoded &encoded) {
    float most[CHUNK / SCALE_GROUP + 1];
    each_group(n, [&](int64_t j, auto size) { most[j / SCALE_GROUP] = largest_of(x + j, size, least); });
    for (int64_t j = 0; j < n; j += SCALE_GROUP) scale[j / SCALE_GROUP] = code_of(most[j / SCALE_GROUP]);
    each_group(n, [&](int64_t first, auto size) {
        float inverse = 1.0f / most[first / SCALE_GROUP];
        for (int64_t j = first; j < first + size; ++j) code[j] = static_cast<Code>(encoded(x[j], inverse));
    });
}

static __attribute__((noinline)) void write_signed(const Entry &e, int64_t i, int64_t n, const float *m) {
    write_groups(m, n, MIN_SCALE, reinterpret_cast<int8_t *>(e.m) + i, e.m_scale + i / SCALE_GROUP, [](float x, float inverse) {
        x = within(-1.0f, x * inverse, 1.0f);
        return rounded(x * 254.0f / (1.0f + std::fabs(x)));
    });
}

static __attribute__((noinline)) void write_roots(const Entry &e, int64_t i, int64_t n, const float *root) {
    write_groups(root, n, MIN_ROOT_SCALE, reinterpret_cast<uint8_t *>(e.v) + i, e.v_scale + i / SCALE_GROUP, [](float x, float inverse) {
        x *= inverse * 255.0f;
        return static_cast<int>((x < 255.0f ? x : 255.0f) + 0.5f);
    });
}

// Adam's update with 8-bit moments; the update uses them before they are rounded.
static __attribute__((noinline)) void adam8_step(const Entry &e, int64_t i, int64_t n, const float *g, float *__restrict out) {
    alignas(ALIGNED) float m[CHUNK], v[CHUNK];
    float a = e.a, b = e.b, lerp1 = e.lerp1, lerp2 = e.lerp2, scale = e.scale;
    read_signed(e, i, n, m);
    read_squares(e, i, n, v);
    for (int64_t j = 0; j < n; ++j) {
        float now = moved(m[j], g[j], lerp1);
        m[j] = std::fabs(now) < MIN_MOMENT ? 0.0f : now;
        float square = moved(v[j], g[j] * g[j], lerp2);
        v[j] = std::sqrt(square > MIN_SQUARE ? square : MIN_SQUARE);
    }
    for (int64_t j = 0; j < n; ++j) out[j] = m[j] / (v[j] * a + b) * scale;
    write_signed(e, i, n, m);
    write_roots(e, i, n, v);
}

INLINE void sign_of_moved(const Entry &e, const float *g, int64_t n, float *__restrict m, float *__restrict out) {
    float lerp1 = e.lerp1, lerp2 = e.lerp2, scale = e.scale;
    for (int64_t j = 0; j < n; ++j) {
        float x = g[j], c = moved(m[j], x, lerp1);
        m[j] = moved(m[j], x, lerp2);
        out[j] = c > 0 ? scale : c < 0 ? -scale : 0.0f;
    }
}

// Lion's update; ``g`` may be ``out``.
static __attribute__((noinline)) void sign_step(const Entry &e, bool is_8bit, int64_t i, int64_t n, const float *g, float *out) {
    float held[CHUNK], *m = is_8bit ? held : e.m + i;
    if (is_8bit)
        read_signed(e, i, n, m);
    else
        prefetch(m, n);
    sign_of_moved(e, g, n, m, out);
    if (is_8bit) write_signed(e, i, n, m);
}

// Returns the input of a pass: up to CHUNK elements, in ``buffer`` or in place. Advances moments.
static __attribute__((noinline)) const float *value(const Call &call, const Entry &e, int64_t i, int64_t n, float *__restrict buffer) {
    const float *u = buffer;
    if (call.form == IS_WEIGHT) return weight(e, call.storage, i, n, buffer);
    bool is_by_factors = call.form == IS_QUOTIENT || call.form == IS_RESIDUAL;
    if (is_by_factors)
        with_gradient(e, call.dtype, i, [&](auto x) {
            x.prefetch(n);
            times_factors(e, i, n, x, buffer);
        });
    else if (call.form != IS_ADAM)
        u = gradient(e, call.dtype, i, n, buffer);
    float scale = e.scale;
    if (call.form == IS_VECTOR) {
        const float *__restrict v = e.v + i;
        for (int64_t j = 0; j < n; ++j) buffer[j] = u[j] * (v[j] == 0.0f ? 0.0f : 1.0f / std::sqrt(v[j])) * scale;
        u = buffer;
    }
    switch (call.form) {
    case IS_RESIDUAL: {
        float *__restrict m = e.m + i, weight = e.lerp1;
        prefetch(m, n);
        for (int64_t j = 0; j < n; ++j) {
            float now = moved(m[j], buffer[j], weight);
            m[j] = now;
            buffer[j] -= now;
        }
        u = buffer;
        break;
    }
    case IS_ADAM: {
        const float *__restrict m = e.m + i, *__restrict v = e.v + i;
        float a = e.a, b = e.b;
        for (int64_t k = 0; k < n; k += FEW_LINES) {
            int64_t end = n - k < FEW_LINES ? n : k + FEW_LINES;
            prefetch(m + k, end - k);
            prefetch(v + k, end - k);
            for (int64_t j = k; j < end; ++j) buffer[j] = divided(m[j], std::sqrt(v[j]) * a + b) * scale;
        }
        break;
    }
    case IS_ADAM_STEP: {
        float *__restrict m = e.m + i, *__restrict v = e.v + i;
        float a = e.a, b = e.b, lerp1 = e.lerp1, lerp2 = e.lerp2;
        for (int64_t k = 0; k < n; k += FEW_LINES) {
            int64_t end = n - k < FEW_LINES ? n : k + FEW_LINES;
            prefetch(m + k, end - k);
            prefetch(v + k, end - k);
            for (int64_t j = k; j < end; ++j) {
                float g = u[j], now = moved(m[j], g, lerp1), square = moved(v[j], g * g, lerp2);
                m[j] = now;
                v[j] = square;
                buffer[j] = divided(now, std::sqrt(square) * a + b) * scale;
            }
        }
        u = buffer;
        break;
    }
    case IS_ADAM8_STEP:
        adam8_step(e, i, n, u, buffer);
        return buffer;
    case IS_SIGN_STEP:
    case IS_SIGN8_STEP:
        sign_step(e, call.form == IS_SIGN8_STEP, i, n, u, buffer);
        return buffer;
    default: break;
    }
    return u;
}

// Sums of squares of the input.
static void square_sums(const Call &call, const Entry &e, const Strip &s, double *partial) {
    alignas(ALIGNED) float buffer[CHUNK], other[CHUNK];
    for (int64_t i = s.begin; i < s.end; i += CHUNK) {
        int64_t n = s.end - i < CHUNK ? s.end - i : CHUNK;
        const float *u = value(call, e, i, n, buffer);
        if (call.decays) {
            const float *w = weight(e, call.storage, i, n, other);
            for (int64_t j = 0; j < n; ++j) buffer[j] = u[j] + e.decay * w[j];
            u = buffer;
        }
        *partial += square_sum(u, n);
    }
}

// If ``notes``, stores the probes of a weight; else compares them, and returns whether all match.
static bool probed(const Call &call, const Entry &e, bool notes) {
    float buffer[1];
    for (int64_t k = 0; k < PROBES && e.n; ++k) {
        float x = *weight(e, call.storage, (2 * k + 1) * e.n / (2 * PROBES), 1, buffer);
        if (notes)
            e.norm_cache[1 + k] = x;
        else if (as_bits(e.norm_cache[1 + k]) != as_bits(x))
            return false;
    }
    return true;
}

// The weights of column sums: 1 / the new statistic of a row whose squares add up to ``sum``.
struct RowWeights {
    static const bool PLAIN = true;  // column sums without weights are wanted too
    const float *before;
    float rest, least, share;
    explicit RowWeights(const Entry &e)
        : before(e.before), rest(1.0f - e.lerp), least(e.lerp * e.eps), share(e.lerp / static_cast<float>(e.cols)) {}
    float out(int64_t, float sum) const { return sum; }
    float operator()(int64_t line, float sum) const {
        float inverse = 1.0f / (before[line] * rest + least + share * sum);
        return inverse > MAX_FACTOR * MAX_FACTOR ? MAX_FACTOR * MAX_FACTOR : inverse;  // 0 / 0 is 0
    }
};

// Adds row sums of squares to out, and column sums to ``col``: [cols] if the strip lies in one large
// matrix, or [mats, cols] if it has small matrices.
static void row_col_sums(const Call &call, const Entry &e, const Strip &s, float *col, bool is_one) {
    alignas(ALIGNED) float buffer[CHUNK];
    for (int64_t i = s.begin; i < s.end;) {
        int64_t line = (e.start + i) / e.cols, c = (e.start + i) % e.cols;
        int64_t length = e.cols - c < s.end - i ? e.cols - c : s.end - i;  // of the row, or its part here
        float *to = (is_one ? col : col + line / e.rows * e.cols) + c;
        double sum = 0;
        for (int64_t k = 0; k < length; k += CHUNK) {
            int64_t n = length - k < CHUNK ? length - k : CHUNK;
            const float *x = value(call, e, i + k, n, buffer);
            float *__restrict at = to + k;
            for (int64_t j = 0; j < n; ++j) at[j] += x[j] * x[j];
            sum += square_sum(x, n);
        }
        e.out[line] += static_cast<float>(sum);
        i += length;
    }
}

// Rows times the factors of columns, each of which gets the norm √cols: reference.normalized.
struct NormalizedRows {
    static const bool PLAIN = false;
    const float *row;
    float least, root;
    explicit NormalizedRows(const Entry &e) : row(e.row), least(e.eps), root(std::sqrt(static_cast<float>(e.cols))) {}
    float out(int64_t line, float sum) const {
        float norm = std::fabs(row[line]) * std::sqrt(sum), now = row[line] * (root / (norm < least ? least : norm));
        return now > MAX_FACTOR ? MAX_FACTOR : now;
    }
    float operator()(int64_t line, float sum) const { return out(line, sum) * out(line, sum); }
};

// Numbers of one row times the factors of their columns.
template <class X> struct ByColumn {
    X x;
    const float *col;
    INLINE_MEMBER float operator[](int64_t j) const { return x[j] * col[j]; }
    INLINE_MEMBER void read(int64_t j, Vector &to) const {
        Vector factor;
        std::memcpy(&factor, col + j, sizeof factor);
        x.read(j, to);
        to *= factor;
    }
};

// Adds squares of up to four rows of n elements, with stride ``cols``, to column sums, and the squares
// times ``weight`` to weighted column sums; or only these, times by².
template <bool PLAIN, class X> static __attribute__((noinline)) void add_squares(X x, int64_t rows, int64_t cols, const float *weight, const float *by,
                                                                                 float *__restrict to, float *__restrict by_weight) {
    if (rows == 4) {
        X x0 = x, x1 = x.from(cols), x2 = x.from(2 * cols), x3 = x.from(3 * cols);
        float w0 = weight[0], w1 = weight[1], w2 = weight[2], w3 = weight[3];
        for (int64_t j = 0; j < cols; ++j) {
            float q0 = x0[j] * x0[j], q1 = x1[j] * x1[j], q2 = x2[j] * x2[j], q3 = x3[j] * x3[j];
            float weighted = (q0 * w0 + q1 * w1) + (q2 * w2 + q3 * w3);
            if (PLAIN) to[j] += (q0 + q1) + (q2 + q3);
            by_weight[j] += PLAIN ? weighted : weighted * (by[j] * by[j]);
        }
        return;
    }
    for (int64_t r = 0; r < rows; ++r) {
        X xr = x.from(r * cols);
        float w = weight[r];
        for (int64_t j = 0; j < cols; ++j) {
            float q = xr[j] * xr[j];
            if (PLAIN) to[j] += q;
            by_weight[j] += PLAIN ? q * w : q * w * (by[j] * by[j]);
        }
    }
}

// weighted_sums of wide rows: four rows of a matrix at a time, so that column sums are updated
// a quarter as often.
template <class Weights, class X> static void weighted_sums_wide(const Entry &e, const Strip &s, X x, float *col, float *by_weight, bool is_one) {
    const Weights weights(e);
    for (int64_t i = s.begin; i < s.end;) {
        int64_t line = (e.start + i) / e.cols, mat = line / e.rows;
        int64_t rows = (s.end - i) / e.cols, left = (mat + 1) * e.rows - line;
        rows = rows < left ? rows : left;
        rows = rows < 4 ? rows : 4;
        float weight[4] = {};
        const float *by = Weights::PLAIN ? nullptr : e.col + mat * e.cols;
        X at = x.from(i);
        for (int64_t r = 0; r < rows; ++r) {
            double sum = 0;
            for (int64_t k = 0; k < e.cols; k += CHUNK) {
                int64_t n = e.cols - k < CHUNK ? e.cols - k : CHUNK;
                X part = at.from(r * e.cols + k);
                part.prefetch(n);
                if constexpr (Weights::PLAIN)
                    sum += square_sum_of(part, n);
                else
                    sum += square_sum_of(ByColumn<X>{part, by + k}, n);
            }
            e.out[line + r] = weights.out(line + r, static_cast<float>(sum));
            weight[r] = weights(line + r, static_cast<float>(sum));
        }
        int64_t first = is_one ? 0 : mat * e.cols;
        add_squares<Weights::PLAIN>(at, rows, e.cols, weight, by, col + first, by_weight + first);
        i += rows * e.cols;
    }
}

// Of a gradient: out ← row sums of squares, and column sums with and without weights. Of a quotient: out
// ← factors that give whole rows the norm √cols, and column sums of the squares of the normalized rows.
static void weighted_sums(const Call &call, const Entry &e, const Strip &s, float *col, float *by_weight, bool is_one) {
    with_gradient(e, call.dtype, 0, [&](auto x) {
        if (call.form == IS_RUN)
            weighted_sums_wide<RowWeights>(e, s, x, col, by_weight, is_one);
        else
            weighted_sums_wide<NormalizedRows>(e, s, x, col, col, is_one);
    });
}

// Moves row and col of one matrix by ``weight`` towards in / cols + eps and in2 / rows + eps. out, out2
// ← the factors of 1 / sqrt(row · col / mean(row)). Returns mean(row) · the sum of in3 / col.
INLINE double factors_of(const Entry &e, int64_t mat) {
    const int64_t rows = e.rows, cols = e.cols;
    float *__restrict row = e.row + mat * rows, *__restrict col = e.col + mat * cols;
    const float *in = e.in + mat * rows, *in2 = e.in2 + mat * cols;
    float *__restrict out = e.out + mat * rows, *__restrict out2 = e.out2 + mat * cols;
    float height = static_cast<float>(rows), width = static_cast<float>(cols), weight = e.lerp, eps = e.eps;
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) row[r] = moved(row[r], in[r] / width + eps, weight);
    for (int64_t r = 0; r < rows; ++r) sum += row[r];
    float mean = static_cast<float>(sum / static_cast<double>(rows));
    if (rows == 1)
        out[0] = 1.0f;
    else
        for (int64_t r = 0; r < rows; ++r) {
            float factor = std::sqrt(mean / row[r]);
            factor = factor > MAX_FACTOR ? MAX_FACTOR : factor;
            out[r] = row[r] == 0.0f ? 0.0f : factor;
        }
    for (int64_t c = 0; c < cols; ++c) {
        float now = moved(col[c], in2[c] / height + eps, weight);
        col[c] = now;
        out2[c] = inverse_root(now);
    }
    double weighted = 0;
    if (e.in3)
        for (int64_t c = 0; c < cols; ++c) weighted += divided(e.in3[mat * cols + c], col[c]);
    return static_cast<double>(mean) * weighted;
}

// The factors of some matrices of a parameter.
static void factors(const Entry &e, const Strip &s, double *partial) {
    for (int64_t mat = s.begin; mat < s.end; ++mat) *partial += factors_of(e, mat);
}

static void advance(const Call &call, const Entry &e, const Strip &s) {
    alignas(ALIGNED) float buffer[CHUNK];
    for (int64_t i = s.begin; i < s.end; i += CHUNK) {
        int64_t n = s.end - i < CHUNK ? s.end - i : CHUNK;
        const float *u = value(call, e, i, n, buffer);
        float *__restrict m = e.out + i, weight = e.lerp, eps = e.eps;
        if (call.pass == SQUARE_LERP)
            for (int64_t j = 0; j < n; ++j) m[j] = moved(m[j], u[j] * u[j] + eps, weight);
        else
            for (int64_t j = 0; j < n; ++j) m[j] = moved(m[j], u[j], weight);
    }
}

// The new value of a weight.
struct Stepped {
    float lr, decay;
    bool decays;
    INLINE_MEMBER float operator()(float w, float u) const { return w - lr * (decays ? u + decay * w : u); }
};

// Steps weights in one loop, in the most common of their formats; returns whether it did. If norms are cached,
// ``squares`` becomes the sum of squares of the new weights. ``now`` is memory for n numbers.
static bool step_at_once(const Call &call, const Entry &e, Stepped stepped, int64_t i, int64_t n, const float *__restrict u, float *__restrict now, double &squares) {
    uint16_t *__restrict narrow = static_cast<uint16_t *>(e.w) + i;
    alignas(ALIGNED) uint16_t drawn[CHUNK];
    if (call.storage == PLAIN_FP32) {
        float *__restrict w = static_cast<float *>(e.w) + i;
        prefetch(w, n);
        for (int64_t j = 0; j < n; ++j) w[j] = stepped(w[j], u[j]);
        if (e.norm_cache) squares = square_sum(w, n);
        return true;
    }
    if (call.storage != PLAIN_BF16 && call.storage != STOCHASTIC_BF16) return false;
    prefetch(narrow, n);
    if (call.storage == PLAIN_BF16) {
        for (int64_t j = 0; j < n; ++j) narrow[j] = float_to_bf16(stepped(bf16_to_float(narrow[j]), u[j]));
    } else {
        const uint16_t *random = noise(static_cast<uint32_t>(e.key), e.origin + i, n, drawn);
        const uint32_t flipped = flips(e.key);
        uint32_t most = 0;
        for (int64_t j = 0; j < n; ++j) {
            now[j] = stepped(bf16_to_float(narrow[j]), u[j]);
            uint32_t bits = as_bits(now[j]), a = bits & 0x7FFFFFFFu;
            most = a > most ? a : most;
            narrow[j] = static_cast<uint16_t>((bits + (random[j] ^ flipped)) >> 16);
        }
        if (most > 0x7F7F0000u) round_odd(now, random, flipped, n, narrow);
    }
    if (e.norm_cache) squares = square_sum_of(Bf16{narrow}, n);
    return true;
}

// w ← w − lr · (u + decay · w)
static void apply(const Call &call, const Entry &e, const Strip &s, double *partial) {
    alignas(ALIGNED) float buffer[CHUNK], old[CHUNK], now[CHUNK];
    const Stepped stepped{e.lr, e.decay, call.decays != 0};
    for (int64_t i = s.begin; i < s.end; i += CHUNK) {
        int64_t n = s.end - i < CHUNK ? s.end - i : CHUNK;
        double squares = 0;
        const float *u = value(call, e, i, n, buffer);
        if (step_at_once(call, e, stepped, i, n, u, now, squares)) {
            *partial += squares;
            continue;
        }
        const float *w = weight(e, call.storage, i, n, old);
        for (int64_t j = 0; j < n; ++j) now[j] = stepped(w[j], u[j]);
        store(e, call.storage, i, n, now);
        if (e.norm_cache) *partial += square_sum(now, n);
    }
}

// The work of a call: its strips, and memory for their partial sums.
struct Work {
    std::vector<Strip> strips;
    std::vector<Aligned> buffer;   // column sums of strips of large matrices, [2, cols] each
    std::vector<double> sums;    // one per strip
    int64_t elements = 0;

    float *columns() { return reinterpret_cast<float *>(buffer.data()); }
};

INLINE bool has_parts(const Call &call, const Entry &e) { return is_by_matrix(call) && is_large(e); }

static Work cut_all(const Call &call, Entry *entries, int64_t count) {
    Work work;
    int64_t floats = 0;
    for (int64_t i = 0; i < count; ++i) {
        Entry &e = entries[i];
        size_t first = work.strips.size();
        if (call.pass == SQUARE_SUMS && e.norm_cache && e.norm_cache[0] >= 0) {
            if (probed(call, e, false)) continue;  // the cached norm is valid
            e.norm_cache[0] = -1;
        }
        if (call.pass == FACTORS) {  // of whole parameters
            int64_t each = e.rows + e.cols, step = each < STRIP ? STRIP / (each ? each : 1) : 1;
            for (int64_t mat = 0; mat < e.mats; mat += step)
                work.strips.push_back({i, mat, mat + step < e.mats ? mat + step : e.mats, 0});
            work.elements += e.mats * each;
        } else {
            cut(e, i, is_by_matrix(call), work.strips);
            work.elements += e.n;
        }
        for (size_t k = first; k < work.strips.size() && has_parts(call, e); ++k) {
            work.strips[k].partial = floats;
            floats += (2 * e.cols + WIDTH - 1) / WIDTH * WIDTH;
        }
    }
    work.buffer.resize(static_cast<size_t>(floats / WIDTH), Aligned{});
    work.sums.resize(work.strips.size(), 0.0);
    return work;
}

static void pass_over(const Call &call, const Entry &e, const Strip &s, float *columns, double *sum) {
    bool is_one = has_parts(call, e);
    float *col = is_one ? columns + s.partial : e.out2;
    switch (call.pass) {
    case SQUARE_SUMS: square_sums(call, e, s, sum); break;
    case ROW_COL_SUMS: row_col_sums(call, e, s, col, is_one); break;
    case WEIGHTED_SUMS: weighted_sums(call, e, s, col, is_one ? col + e.cols : e.out3, is_one); break;
    case FACTORS: factors(e, s, sum); break;
    case LERP:
    case SQUARE_LERP: advance(call, e, s); break;
    case APPLY: apply(call, e, s, sum); break;
    }
}

// Uses the sum of a parameter as the pass requires.
static void end_with(const Call &call, const Entry &e, double sum) {
    switch (call.pass) {
    case SQUARE_SUMS:
        *e.out = e.norm_cache && e.norm_cache[0] >= 0 ? e.norm_cache[0] : static_cast<float>(sum);
        break;
    case FACTORS:
        if (e.in3) {
            int64_t lines = e.mats * e.rows;
            float ratio = e.clip / static_cast<float>(std::sqrt(sum / static_cast<double>(lines * e.cols)));
            if (ratio < 1.0f || ratio != ratio)
                for (int64_t r = 0; r < lines; ++r) e.out[r] *= ratio;
        }
        break;
    case APPLY:
        if (e.norm_cache) {
            e.norm_cache[0] = static_cast<float>(sum);
            probed(call, e, true);
        }
        break;
    default: break;
    }
}

// Reduces the partial results of each parameter's strips, in order.
static void put_together(const Call &call, Entry *entries, int64_t count, Work &work) {
    size_t k = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Entry &e = entries[i];
        double sum = 0;
        for (; k < work.strips.size() && work.strips[k].entry == i; ++k) {
            sum += work.sums[k];
            if (!has_parts(call, e)) continue;
            int64_t first = (e.start + work.strips[k].begin) / (e.rows * e.cols) * e.cols;
            const float *from = work.columns() + work.strips[k].partial;
            for (int64_t c = 0; c < e.cols; ++c) e.out2[first + c] += from[c];
            if (call.pass == WEIGHTED_SUMS && e.out3)
                for (int64_t c = 0; c < e.cols; ++c) e.out3[first + c] += from[e.cols + c];
        }
        end_with(call, e, sum);
    }
}

static void run(const Call &call, Entry *entries, int64_t count, int threads) {
    Work work = cut_all(call, entries, count);
    auto task = [&](int64_t k) {
        const Strip &s = work.strips[static_cast<size_t>(k)];
        pass_over(call, entries[s.entry], s, work.columns(), &work.sums[static_cast<size_t>(k)]);
    };
    parallel(static_cast<int64_t>(work.strips.size()), work.elements < STRIP ? 1 : threads, task);
    put_together(call, entries, count, work);
}

#undef INLINE
#undef INLINE_MEMBER

}  // namespace ISA

#endif
