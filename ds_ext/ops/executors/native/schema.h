// Written by `make readme` from ds_ext/ops/schema.py. Do not edit.
#include <cstdint>

// One parameter.
struct Entry {
    int64_t start;  // the run [start, start + n) of [mats, rows, cols]
    int64_t n;  // its elements
    int64_t mats;
    int64_t rows;
    int64_t cols;
    int64_t origin;  // the number of its first element, for random bits
    const void *x;  // a gradient, or another run that is read
    float *m;  // a moment: a run, or the codes of one of 8 bits
    float *v;  // the second moment, as m
    uint16_t *m_scale;  // the scales of the codes of m
    uint16_t *v_scale;  // the scales of the codes of v
    void *w;  // the weights
    void *aux;  // what is stored beside them, by the storage format
    float *out;  // what a pass writes
    float *out2;
    float *row;  // statistics or factors, [mats, rows]
    float *col;  // statistics or factors, [mats, cols]
    const float *before;  // row statistics before the step
    const float *in;  // sums over all ranks
    const float *in2;
    const float *in3;
    int16_t *marks;  // fingerprints of groups of weights
    float *out3;
    double *update_sums;  // [2]: sums of squares of changes and of new weights
    float *norm_cache;  // [1 + PROBES]: a cached norm, and weights that were written
    uint32_t key;  // of random bits
    float factor;  // of x
    float bound;  // of x · factor
    float scale;  // of an update
    float lr;
    float decay;  // weight decay
    float lerp1;  // the weight of x in m: 1 − beta1
    float lerp2;  // the weight of x² in v: 1 − beta2; Lion's of x in m
    float a;  // Adam: m / (sqrt(v) · a + b)
    float b;
    float eps;
    float clip;  // the largest RMS of an update
    float lerp;  // the weight of what a statistic or moment moves towards
};

// What is the same for all parameters of a call.
struct Call {
    int pass, form, dtype, storage, decays, fresh;
};

enum Form {
    IS_WEIGHT,
    IS_RUN,
    IS_QUOTIENT,
    IS_VECTOR,
    IS_ADAM,
    IS_ADAM_STEP,
    IS_RESIDUAL,
    IS_VECTOR_RESIDUAL,
    IS_ADAM8_STEP,
    IS_SIGN_STEP,
    IS_SIGN8_STEP,
};

enum Dtype {
    FP32,
    BF16,
    FP16,
};

enum Storage {
    PLAIN_FP32,
    PLAIN_BF16,
    PLAIN_FP16,
    STOCHASTIC_BF16,
    STOCHASTIC_FP16,
    SPLIT_BF16,
    COPIED_FP16,
    CORRECTED_BF16,
    CORRECTED_FP16,
};

enum Pass {
    LARGEST,
    SQUARE_SUMS,
    ROW_COL_SUMS,
    WEIGHTED_SUMS,
    FACTORS,
    ADVANCE_1X1,
    SCATTERED_SQUARES,
    LERP,
    SQUARE_LERP,
    APPLY,
    MARK,
    MEND,
    NORMALIZE_WHOLE_ROWS,
    NORMALIZE_ROWS,
    NORMALIZE_COLUMNS,
};

const int64_t GROUP = 256;
const int PROBES = 31;
const float PARTS = 127.0f, MOST = 126.75f, HALF = 0.49999f;
