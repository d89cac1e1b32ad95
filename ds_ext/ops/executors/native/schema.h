// Written by `make readme` from ds_ext/ops/schema.py. Do not edit.
#include <cstdint>

// One parameter.
struct Entry {
    int64_t start;  // first element of the run [start, start + n) of [mats, rows, cols]
    int64_t n;  // elements in the run
    int64_t mats;  // matrices of the parameter
    int64_t rows;  // rows of a matrix
    int64_t cols;  // columns of a matrix
    int64_t origin;  // index of the run's first element, for random bits
    const void *x;  // the gradient, or another input run
    float *m;  // the first moment: fp32 values, or 8-bit codes
    float *v;  // the second moment: fp32 values, or 8-bit codes
    uint16_t *m_scale;  // scales of the 8-bit codes in m
    uint16_t *v_scale;  // scales of the 8-bit codes in v
    void *w;  // the weights
    void *aux;  // additional data of the storage format of w
    float *out;  // output of the pass
    float *out2;  // second output
    float *row;  // row statistics or factors, [mats, rows]
    float *col;  // column statistics or factors, [mats, cols]
    const float *before;  // row statistics before the step
    const float *in;  // sums over all ranks
    const float *in2;  // second input: further sums or factors
    const float *in3;  // third input
    float *out3;  // third output
    double *update_sums;  // [2]: sums of squares of the weight changes and of the new weights
    float *norm_cache;  // [1 + PROBES]: cached sum of squares, and sampled weights
    uint32_t key;  // key of the random bits
    float factor;  // multiplies x
    float bound;  // x · factor is clamped to ± bound
    float scale;  // multiplies the update
    float lr;  // learning rate
    float decay;  // weight decay
    float lerp1;  // the weight of x in m: 1 − beta1
    float lerp2;  // the weight of x² in v: 1 − beta2; for Lion, of x in m
    float a;  // in Adam's update: m / (sqrt(v) · a + b); in kernels of factors, 1 / elements
    float b;  // in Adam's update, see a
    float eps;  // small constant that keeps divisors above zero
    float clip;  // upper limit of the RMS of the update
    float lerp;  // the weight of the new value in a statistic or moment
};

// Arguments that all parameters of a call share.
struct Call {
    int pass, form, dtype, storage, decays;
};

enum Form {
    IS_WEIGHT,
    IS_RUN,
    IS_QUOTIENT,
    IS_VECTOR,
    IS_ADAM,
    IS_ADAM_STEP,
    IS_RESIDUAL,
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
    SQUARE_SUMS,
    ROW_COL_SUMS,
    WEIGHTED_SUMS,
    FACTORS,
    LERP,
    SQUARE_LERP,
    APPLY,
};

const int64_t SCALE_GROUP = 32;
const int64_t NOISE_CHUNK = 65536;
const int PROBES = 31;
const int SCALE_CUT = 13;
const float ERROR_LEVELS = 127.0f;
const float MAX_ERROR_CODE = 126.75f;
const float MAX_INWARD_CODE = 63.0f;
const float HALF = 0.49999f;
const float MIN_SCALE = 5.684341886080802e-14f;
const float MAX_SCALE = 1048064.0f;
const float MIN_ROOT_SCALE = 4.547473508864641e-13f;
const float MIN_MOMENT = 7.888609052210118e-31f;
const float MIN_SQUARE = 7.888609052210118e-31f;
const uint32_t SCALE_FIRST = 0x14c00u;
const uint32_t NOISE1 = 0x2993u;
const uint32_t NOISE2 = 0xe877u;
const uint32_t NOISE3 = 0x235u;
const uint32_t LOWBIAS1 = 0x7feb352du;
const uint32_t LOWBIAS2 = 0x846ca68bu;
const uint32_t PRIME1 = 0x9e3779b1u;
const uint32_t PRIME2 = 0x85ebca77u;
const uint32_t PRIME3 = 0xc2b2ae3du;
