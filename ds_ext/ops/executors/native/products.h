// Products of bf16 matrices with fp32 sums, on processors with AVX-512 BF16. passes.cpp includes this file.
//
// A task computes PANEL columns of some rows of the result. It packs B so that pairs of consecutive k
// lie together, as the instruction needs them. The sum of an element runs over k in order, so its bits
// depend neither on threads nor on how rows and columns are cut. Subnormal numbers count as 0.

#if defined(DS_EXT_VECTORS) && __GNUC__ >= 11  // which knows the name "avx512bf16"
#define DS_EXT_BF16
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512")

namespace bf16 {

const int64_t ROWS = 6, VECTORS = 4, PANEL = VECTORS * WIDTH;  // of the result, in registers
const int64_t DEPTH = 1024;                                    // rows of B in the cache
const int64_t TASK_ROWS = 86 * ROWS;                           // many, because each task packs B
const int64_t FEW = 1 << 22;                                   // multiplications that one thread makes

// Element (i, k) is at data[i * row + k * col].
struct Matrix {
    const uint16_t *data;
    int64_t row, col;
    uint16_t at(int64_t i, int64_t k) const { return data[i * row + k * col]; }
    Matrix from(int64_t i, int64_t k) const { return {data + i * row + k * col, row, col}; }
};

inline uint32_t pair(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

// [depth, cols] -> [depth / 2, PANEL] pairs, filled up with zeros.
inline void pack(const Matrix &b, int64_t depth, int64_t cols, uint32_t *to) {
    for (int64_t k = 0; k < depth; k += 2, to += PANEL) {
        bool two = k + 1 < depth;
        int64_t j = 0;
        if (b.col == 1 && two)
            for (; j + WIDTH <= cols; j += WIDTH) {
                auto read = [&](int64_t row) {
                    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(b.data + row * b.row + j)));
                };
                _mm512_storeu_si512(to + j, _mm512_or_si512(read(k), _mm512_slli_epi32(read(k + 1), 16)));
            }
        for (; j < cols; ++j) to[j] = pair(b.at(k, j), two ? b.at(k + 1, j) : 0);
        for (; j < PANEL; ++j) to[j] = 0;
    }
}

// c[R, cols] (+)= pairs of A · pairs of B. Pair k of row i is at a[i * row + k * step].
template <int R> inline void tile(const uint16_t *a, int64_t row, int64_t step, const uint32_t *b, int64_t pairs, float *c, int64_t width, int64_t cols, bool adds) {
    __m512 sum[R][VECTORS];
    __mmask16 mask[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
        int64_t left = cols - v * WIDTH;
        mask[v] = static_cast<__mmask16>(left >= WIDTH ? 0xFFFF : left > 0 ? (1 << left) - 1 : 0);
    }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < VECTORS; ++v) sum[i][v] = adds ? _mm512_maskz_loadu_ps(mask[v], c + i * width + v * WIDTH) : _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; ++k, a += step, b += PANEL) {
        __m512i right[VECTORS];
        for (int v = 0; v < VECTORS; ++v) right[v] = _mm512_loadu_si512(b + v * WIDTH);
        for (int i = 0; i < R; ++i) {
            int32_t two;
            std::memcpy(&two, a + i * row, 4);
            __m512i left = _mm512_set1_epi32(two);
            for (int v = 0; v < VECTORS; ++v) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], (__m512bh)right[v], (__m512bh)left);
        }
    }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < VECTORS; ++v) _mm512_mask_storeu_ps(c + i * width + v * WIDTH, mask[v], sum[i][v]);
}

inline void tiles(const uint16_t *a, int64_t row, int64_t step, const uint32_t *b, int64_t pairs, float *c, int64_t width, int64_t rows, int64_t cols, bool adds) {
    switch (rows) {
    case 1: return tile<1>(a, row, step, b, pairs, c, width, cols, adds);
    case 2: return tile<2>(a, row, step, b, pairs, c, width, cols, adds);
    case 3: return tile<3>(a, row, step, b, pairs, c, width, cols, adds);
    case 4: return tile<4>(a, row, step, b, pairs, c, width, cols, adds);
    case 5: return tile<5>(a, row, step, b, pairs, c, width, cols, adds);
    default: return tile<ROWS>(a, row, step, b, pairs, c, width, cols, adds);
    }
}

// c [m, n], rows ``width`` apart, (+)= a [m, k] · b [k, n].
inline void multiply(Matrix a, const Matrix &b, float *c, int64_t width, int64_t m, int64_t k, int64_t n, bool adds, int threads) {
    std::vector<uint32_t> pairs;
    int64_t row = a.row, step = 2;
    if (a.col != 1 || k % 2) {  // pairs of A do not lie in memory: [k / 2, m]
        pairs.resize(static_cast<size_t>((k + 1) / 2 * m));
        for (int64_t i = 0; i < k; i += 2)
            for (int64_t j = 0; j < m; ++j) pairs[static_cast<size_t>(i / 2 * m + j)] = pair(a.at(j, i), i + 1 < k ? a.at(j, i + 1) : 0);
        a.data = reinterpret_cast<const uint16_t *>(pairs.data());
        row = 2, step = 2 * m;
    }
    int64_t panels = (n + PANEL - 1) / PANEL, parts = (m + TASK_ROWS - 1) / TASK_ROWS;
    parallel(panels * parts, m * k * n < FEW ? 1 : threads, [&](int64_t task) {
        int64_t j = task % panels * PANEL, cols = n - j < PANEL ? n - j : PANEL;
        int64_t first = task / panels * TASK_ROWS, last = first + TASK_ROWS < m ? first + TASK_ROWS : m;
        thread_local std::vector<uint32_t> packed;
        packed.resize(static_cast<size_t>(DEPTH / 2 * PANEL));
        int64_t at = 0;
        do {
            int64_t depth = k - at < DEPTH ? k - at : DEPTH;
            pack(b.from(at, j), depth, cols, packed.data());
            for (int64_t i = first; i < last; i += ROWS)
                tiles(a.data + i * row + at / 2 * step, row, step, packed.data(), (depth + 1) / 2, c + i * width + j, width, last - i, cols, adds || at > 0);
        } while ((at += DEPTH) < k);
    });
}

}  // namespace bf16

#pragma GCC pop_options
#endif

// Whether products_run can be called.
extern "C" __attribute__((visibility("default"))) int products_available() {
#ifdef DS_EXT_BF16
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
#else
    return 0;
#endif
}

// Writes a [m, k] · b [k, n], or adds it, to c [m, n]. sizes: m, k, n, the two strides of a and of b, c's stride of rows.
extern "C" __attribute__((visibility("default"))) void products_run(const uint16_t *a, const uint16_t *b, float *c, const int64_t *sizes, int adds, int threads) {
#ifdef DS_EXT_BF16
    bf16::multiply({a, sizes[3], sizes[4]}, {b, sizes[5], sizes[6]}, c, sizes[7], sizes[0], sizes[1], sizes[2], adds, threads);
#else
    (void)a, (void)b, (void)c, (void)sizes, (void)adds, (void)threads;
#endif
}
