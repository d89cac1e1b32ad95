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
const int64_t TASKS = 4;                                       // of each thread, if rows are cut: each task packs B
const int64_t BOX_ROWS = 4 * ROWS, BOX_COLS = 32 * PANEL;      // of an update that is computed and applied
const int64_t SERIAL_BELOW = 1 << 22;                          // multiplications that one thread makes

// Element (i, k) is at data[i * row + k * col].
struct Matrix {
    const uint16_t *data;
    int64_t row, col;
    uint16_t at(int64_t i, int64_t k) const { return data[i * row + k * col]; }
    __m256i some(int64_t at) const { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(data + at)); }  // WIDTH numbers
    void prefetch(int64_t at) const { _mm_prefetch(reinterpret_cast<const char *>(data + at), _MM_HINT_T1); }
    Matrix from(int64_t i, int64_t k) const { return {data + i * row + k * col, row, col}; }
    Matrix transposed() const { return {data, col, row}; }
};

inline uint32_t pair(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

// Transposes WIDTH x WIDTH numbers of 32 bits.
inline void transpose(__m512i *x) {
    __m512i y[WIDTH];
    for (int i = 0; i < WIDTH; i += 2) y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    for (int i = 0; i < WIDTH; i += 4)
        for (int j = 0; j < 2; ++j)
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]), x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    for (int i = 0; i < WIDTH; i += 8)
        for (int j = 0; j < 4; ++j)
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88), y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
    for (int j = 0; j < 8; ++j)
        x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88), x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
}

// [depth, cols] -> [depth / 2, width] pairs, of which those after ``cols`` become zeros up to ``filled``.
inline void pack(const Matrix &b, int64_t depth, int64_t cols, uint32_t *to, int64_t width, int64_t filled) {
    int64_t done = 0;  // rows of pairs that are packed
    if (b.row == 1)    // pairs lie together
        for (int64_t pairs = depth / 2; done + WIDTH <= pairs; done += WIDTH) {
            int64_t j = 0;
            for (; j + WIDTH <= cols; j += WIDTH) {
                __m512i x[WIDTH];
                for (int64_t i = 0; i < WIDTH; ++i) x[i] = _mm512_loadu_si512(b.data + 2 * done + (j + i) * b.col);
                transpose(x);
                for (int64_t i = 0; i < WIDTH; ++i) _mm512_storeu_si512(to + (done + i) * width + j, x[i]);
            }
            for (int64_t i = done; i < done + WIDTH; ++i) {
                for (int64_t q = j; q < cols; ++q) to[i * width + q] = pair(b.at(2 * i, q), b.at(2 * i + 1, q));
                for (int64_t q = cols; q < filled; ++q) to[i * width + q] = 0;
            }
        }
    to += done * width;
    for (int64_t k = 2 * done; k < depth; k += 2, to += width) {
        bool two = k + 1 < depth;
        int64_t j = 0;
        if (b.col == 1)
            for (; j + WIDTH <= cols; j += WIDTH) {
                b.prefetch(k * b.row + j + width), b.prefetch((k + 1) * b.row + j + width);  // of the next panel
                __m512i low = _mm512_cvtepu16_epi32(b.some(k * b.row + j));
                __m512i high = two ? _mm512_slli_epi32(_mm512_cvtepu16_epi32(b.some((k + 1) * b.row + j)), 16) : _mm512_setzero_si512();
                _mm512_storeu_si512(to + j, _mm512_or_si512(low, high));
            }
        for (; j < cols; ++j) to[j] = pair(b.at(k, j), two ? b.at(k + 1, j) : 0);
        for (; j < filled; ++j) to[j] = 0;
    }
}

// c[R, cols] ← beta · c + pairs of A · pairs of B; c is not read if beta is 0. Pair k of row i is at a[i * row + k * step].
template <int R> inline void tile(const uint16_t *a, int64_t row, int64_t step, const uint32_t *b, int64_t pairs, float *c, int64_t width, int64_t cols, float beta) {
    __m512 sum[R][VECTORS];
    __mmask16 mask[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
        int64_t left = cols - v * WIDTH;
        mask[v] = static_cast<__mmask16>(left >= WIDTH ? 0xFFFF : left > 0 ? (1 << left) - 1 : 0);
    }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < VECTORS; ++v) sum[i][v] = beta == 0 ? _mm512_setzero_ps() : _mm512_mul_ps(_mm512_maskz_loadu_ps(mask[v], c + i * width + v * WIDTH), _mm512_set1_ps(beta));
    for (int64_t k = 0; k < pairs; ++k, a += step, b += PANEL) {
        if (step == 2 && k % WIDTH == 0)  // a cache line of each row of the next tile
            for (int i = 0; i < R; ++i) _mm_prefetch(reinterpret_cast<const char *>(a + (i + R) * row), _MM_HINT_T0);
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

inline void tiles(const uint16_t *a, int64_t row, int64_t step, const uint32_t *b, int64_t pairs, float *c, int64_t width, int64_t rows, int64_t cols, float beta) {
    switch (rows) {
    case 1: return tile<1>(a, row, step, b, pairs, c, width, cols, beta);
    case 2: return tile<2>(a, row, step, b, pairs, c, width, cols, beta);
    case 3: return tile<3>(a, row, step, b, pairs, c, width, cols, beta);
    case 4: return tile<4>(a, row, step, b, pairs, c, width, cols, beta);
    case 5: return tile<5>(a, row, step, b, pairs, c, width, cols, beta);
    default: return tile<ROWS>(a, row, step, b, pairs, c, width, cols, beta);
    }
}

// A [m, k]: pair q of row i is at data[i * row + q * step].
struct Left {
    const uint16_t *data;
    int64_t row, step;
};

// A as it lies in memory, or its pairs in ``pairs``.
inline Left left_of(const Matrix &a, int64_t m, int64_t k, std::vector<uint32_t> &pairs, int threads) {
    if (a.col == 1 && k % 2 == 0) return {a.data, a.row, 2};
    pairs.resize(static_cast<size_t>((k + 1) / 2 * m));  // [k / 2, m]
    const int64_t part = 4 * PANEL;
    parallel((m + part - 1) / part, threads, [&](int64_t task) {
        int64_t i = task * part, rows = m - i < part ? m - i : part;
        pack(a.from(i, 0).transposed(), k, rows, pairs.data() + i, m, rows);
    });
    return {reinterpret_cast<uint16_t *>(pairs.data()), 2, 2 * m};
}

// Columns [begin, end) of rows [first, last) above the diagonal of c, mirrored.
inline void mirror(float *c, int64_t width, int64_t first, int64_t last, int64_t begin, int64_t end) {
    for (int64_t i = first; i < last; i += WIDTH)
        for (int64_t j = begin; j < end; j += WIDTH) {
            int64_t rows = last - i < WIDTH ? last : i + WIDTH, cols = end - j < WIDTH ? end : j + WIDTH;
            if (rows - i == WIDTH && cols - j == WIDTH && rows <= j) {
                __m512i x[WIDTH];
                for (int64_t q = 0; q < WIDTH; ++q) x[q] = _mm512_loadu_si512(c + (i + q) * width + j);
                transpose(x);
                for (int64_t q = 0; q < WIDTH; ++q) _mm512_storeu_si512(c + (j + q) * width + i, x[q]);
                continue;
            }
            for (int64_t r = i; r < rows; ++r)
                for (int64_t q = j > r ? j : r + 1; q < cols; ++q) c[q * width + r] = c[r * width + q];
        }
}

// c [m, n], rows ``width`` apart, ← beta · c + a [m, k] · b [k, n]. If c is symmetric, half of it is computed, and mirrored.
inline void multiply(const Matrix &a, const Matrix &b, float *c, int64_t width, int64_t m, int64_t k, int64_t n, float beta, bool symmetric, int threads) {
    if (m * k * n < SERIAL_BELOW) threads = 1;
    std::vector<uint32_t> pairs;
    const Left left = left_of(a, m, k, pairs, threads);
    int64_t unit = symmetric ? PANEL : ROWS;  // one task mirrors the square on the diagonal
    int64_t panels = (n + PANEL - 1) / PANEL, heights = (m + unit - 1) / unit;
    int64_t parts = threads < 2 ? 1 : (TASKS * threads + panels - 1) / panels;
    int64_t task_rows = (heights + parts - 1) / parts * unit;
    parallel(panels * parts, threads, [&](int64_t task) {
        int64_t panel = symmetric ? panels - 1 - task % panels : task % panels;  // the longest ones first
        int64_t j = panel * PANEL, cols = n - j < PANEL ? n - j : PANEL;
        int64_t first = task / panels * task_rows, last = first + task_rows < m ? first + task_rows : m;
        if (symmetric && last > j + cols) last = j + cols;
        if (first >= last) return;
        thread_local std::vector<uint32_t> packed;
        packed.resize(static_cast<size_t>(DEPTH / 2 * PANEL));
        int64_t at = 0;
        do {
            int64_t depth = k - at < DEPTH ? k - at : DEPTH;
            pack(b.from(at, j), depth, cols, packed.data(), PANEL, PANEL);
            for (int64_t i = first; i < last; i += ROWS)
                tiles(left.data + i * left.row + at / 2 * left.step, left.row, left.step, packed.data(), (depth + 1) / 2, c + i * width + j, width, last - i, cols, at > 0 ? 1 : beta);
        } while ((at += DEPTH) < k);
        if (symmetric) mirror(c, width, first, last, j, j + cols);
    });
}

// Makes the pass APPLY over one run of a matrix, by the update a · b. Row ``first`` of the matrix is the first row
// of ``a`` [rows, k]. A box of the update is computed and applied while it is in the cache.
inline void apply(const Call &call, const Entry &e, const Matrix &a, const Matrix &b, int64_t k, int64_t first, int threads) {
    int64_t n = e.cols, stop = e.start + e.n, panels = (n + PANEL - 1) / PANEL, size = (k + 1) / 2 * PANEL;
    if (e.n * k < SERIAL_BELOW) threads = 1;
    std::vector<uint32_t> packed(static_cast<size_t>(panels * size));
    parallel(panels, threads, [&](int64_t j) {
        int64_t left = n - j * PANEL;
        pack(b.from(0, j * PANEL), k, left < PANEL ? left : PANEL, packed.data() + j * size, PANEL, PANEL);
    });
    const int64_t weight = call.storage == PLAIN_FP32 ? 4 : 2;  // bytes
    int64_t low = e.start / n, high = (stop + n - 1) / n, across = (n + BOX_COLS - 1) / BOX_COLS;
    parallel((high - low + BOX_ROWS - 1) / BOX_ROWS * across, threads, [&](int64_t task) {
        int64_t top = low + task / across * BOX_ROWS, rows = high - top < BOX_ROWS ? high - top : BOX_ROWS;
        int64_t begin = task % across * BOX_COLS, end = n - begin < BOX_COLS ? n : begin + BOX_COLS;
        thread_local std::vector<uint32_t> pairs;
        thread_local std::vector<float> update(static_cast<size_t>(BOX_ROWS * BOX_COLS));
        const Left left = left_of(a.from(top - first, 0), rows, k, pairs, 1);
        for (int64_t j = begin; j < end; j += PANEL)
            for (int64_t i = 0; i < rows; i += ROWS) {
                for (int64_t r = i; r < i + ROWS && r < rows; ++r)
                    for (int64_t at = (top + r) * n + j - e.start, q = 0; q < PANEL * weight; q += 64)
                        __builtin_prefetch(static_cast<const char *>(e.w) + at * weight + q, 1, 2);
                tiles(left.data + i * left.row, left.row, left.step, packed.data() + j / PANEL * size, (k + 1) / 2, &update[static_cast<size_t>(i * BOX_COLS + j - begin)], BOX_COLS, rows - i, end - j, 0);
            }
        Entry own = e;
        for (int64_t i = 0; i < rows; ++i) {
            int64_t at = (top + i) * n, from = at + begin > e.start ? at + begin : e.start, to = at + end < stop ? at + end : stop;
            if (from >= to) continue;
            own.x = &update[static_cast<size_t>(i * BOX_COLS + from - at - begin)] - (from - e.start);
            double sums[2];
            v4::apply(call, own, {0, from - e.start, to - e.start, 0}, sums);
        }
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

// c [m, n] ← beta · c + a [m, k] · b [k, n], for each of several matrices. sizes: m, k, n, the two strides of a and of b,
// c's stride of rows, the number of matrices, and the strides of a, b, c and beta from one to the next. symmetric: c is
// symmetric.
extern "C" __attribute__((visibility("default"))) void products_run(const uint16_t *a, const uint16_t *b, float *c, const int64_t *sizes, const float *beta, int symmetric, int threads) {
#ifdef DS_EXT_BF16
    for (int64_t i = 0; i < sizes[8]; ++i) {
        const bf16::Matrix left = {a + i * sizes[9], sizes[3], sizes[4]}, right = {b + i * sizes[10], sizes[5], sizes[6]};
        bf16::multiply(left, right, c + i * sizes[11], sizes[7], sizes[0], sizes[1], sizes[2], beta[i * sizes[12]], symmetric, threads);
    }
#else
    (void)a, (void)b, (void)c, (void)sizes, (void)beta, (void)symmetric, (void)threads;
#endif
}

// Makes the pass APPLY over one run, by the update a [rows, k] · b [k, cols]. sizes: k, the row of the matrix that is a's
// first, and the two strides of a and of b.
extern "C" __attribute__((visibility("default"))) void products_apply(const Call *call, const Entry *entry, const uint16_t *a, const uint16_t *b, const int64_t *sizes, int threads) {
#ifdef DS_EXT_BF16
    bf16::apply(*call, *entry, {a, sizes[2], sizes[3]}, {b, sizes[4], sizes[5]}, sizes[0], sizes[1], threads);
#else
    (void)call, (void)entry, (void)a, (void)b, (void)sizes, (void)threads;
#endif
}
