/* Decoder layers of the Llama family, above all over the few rows of a decoding step, for x86 CPUs; see native.py.
 *
 * A pass over few rows waits for the weights, so each weight is read once, in the order in which it lies in memory, and
 * converted to float32 in registers.  What lies between the products is small, but some dozens of calls per layer, each
 * cold because the weights have streamed through the caches: here it is one function, with one team of threads for all
 * layers.
 *
 * No row's result depends on which rows ride along, nor on the number of threads: every sum runs over the same numbers in
 * the same order.  A product sums over its inputs from the first to the last; attention runs over the row's own path in
 * order of position, wherever its rows lie in the cache.
 */
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

enum {
    LANES = 8,
    PANEL = 2 * LANES, /* outputs that are computed together; their weights lie input by input */
    DEPTH = 512,       /* inputs per visit of a panel, so that both its weights and a tile's inputs stay in the L1 cache */
    CHUNK = 96,        /* rows per reading of all weights */
    QUERIES = 32,      /* that share a reading of the keys */
    AHEAD = 4096,      /* bytes from the weight in use to the one that is fetched; hardware stops at each page */
};

#define UNROLLED _Pragma("GCC unroll 12")

/* A panel's outputs for one row in registers, and TILE, the rows that share a converted weight: 12 sums, 2 weights and an
 * input fill AVX2's 16 registers. */
#ifdef __AVX512F__
typedef __m512 Vector;
enum { VECTORS = 1, TILE = 12 };
#define VECTOR(operation) _mm512_##operation
#define EACH_HEIGHT(of) of(1) of(2) of(3) of(4) of(5) of(6) of(7) of(8) of(9) of(10) of(11)
static inline Vector from_half(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
static inline Vector from_byte(const int8_t *x)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}
#else
typedef __m256 Vector;
enum { VECTORS = 2, TILE = 6 };
#define VECTOR(operation) _mm256_##operation
#define EACH_HEIGHT(of) of(1) of(2) of(3) of(4) of(5)
static inline Vector from_half(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }
static inline Vector from_byte(const int8_t *x)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
}
#endif

/* Weights [panels, inputs, PANEL] of a linear map, padded with zeros to whole panels; `bytes` for each of them: 4 is float32,
 * 2 float16, 1 a whole number, whose unit is the output's scale. */
typedef struct {
    int64_t outputs, inputs;
    const void *weights;
    const float *bias;   /* may be NULL */
    const float *scales; /* of each output, before the bias, padded like the weights; may be NULL */
    float scale;         /* of all; a power of two */
    int32_t bytes;
} Linear;

typedef struct {
    const float *attention_norm, *query_norm, *key_norm; /* each may be NULL */
    const float *mlp_norm;
    Linear qkv, out, gate_up, down;
} Layer;

/* Norms' weights hold a factor of the square root of their size; see `normalize`. */
typedef struct {
    int64_t layers, width, inner, heads, kv_heads, size;
    float eps;
    const Layer *layer;
    const float *final_norm; /* may be NULL */
} Blocks;

/* One pass.  The rows' own keys and values go to the slots total - rows .. total - 1. */
typedef struct {
    int64_t rows, total, newest;
    const uint8_t *visible; /* [rows, newest]: which of the newest slots a row attends to; it attends to all before */
    const float *turns;     /* [rows, size / 2, 2]: cosine and sine */
    float *kv;              /* [layers, 2 * kv_heads, slots, size]: keys, then values */
    int64_t layer_stride, head_stride;
} Pass;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Thread `id` of `team` has the items from part(n, id) up to part(n, id + 1). */
static inline int64_t part(int64_t n, int64_t id, int64_t team) { return n * id / team; }

/* ---- products -------------------------------------------------------------------------------------------------- */

/* Add to sums [rows, PANEL] what `depth` inputs contribute; `rows` and `bytes` are constants where this is called. */
__attribute__((always_inline)) static inline void tile(
    const int rows, const int bytes, const void *weights, const float *x, int64_t stride, int64_t depth, float *sums)
{
    enum { WIDTH = PANEL / VECTORS };
    Vector s[TILE][VECTORS]; /* where a compiler leaves the loops over these rolled, they stay in memory */
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            s[r][v] = VECTOR(loadu_ps)(sums + r * PANEL + v * WIDTH);
    for (int64_t k = 0; k < depth; k++) {
        Vector w[VECTORS];
        const char *at = (const char *)weights + k * PANEL * bytes;
        _mm_prefetch(at + AHEAD, _MM_HINT_T0);
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const void *part = at + v * WIDTH * bytes;
            w[v] = bytes == 1 ? from_byte(part) : bytes == 2 ? from_half(part) : VECTOR(loadu_ps)(part);
        }
        UNROLLED for (int r = 0; r < rows; r++) {
            const Vector input = VECTOR(set1_ps)(x[r * stride + k]);
            UNROLLED for (int v = 0; v < VECTORS; v++)
                s[r][v] = VECTOR(fmadd_ps)(input, w[v], s[r][v]);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            VECTOR(storeu_ps)(sums + r * PANEL + v * WIDTH, s[r][v]);
}

#define HEIGHT(rows) case rows: tile(rows, BYTES, weights, x, stride, depth, sums); return;
#define TILES(name)                                                                                                    \
    static void name(int64_t rows, const void *weights, const float *x, int64_t stride, int64_t depth, float *sums)   \
    {                                                                                                                  \
        switch (rows) { EACH_HEIGHT(HEIGHT) }                                                                          \
        tile(TILE, BYTES, weights, x, stride, depth, sums);                                                            \
    }
#define BYTES 1
TILES(byte_tile)
#undef BYTES
#define BYTES 2
TILES(half_tile)
#undef BYTES
#define BYTES 4
TILES(full_tile)

/* One panel's outputs for x [rows, inputs], into sums [rows, PANEL]. */
static void panel(const Linear *map, int64_t index, const float *x, int64_t rows, float *sums)
{
    const int64_t inputs = map->inputs, bytes = PANEL * map->bytes;
    const char *weights = (const char *)map->weights + index * inputs * bytes;
    const int64_t tiles = (rows + TILE - 1) / TILE;
    memset(sums, 0, rows * PANEL * sizeof(float));
    for (int64_t k = 0; k < inputs; k += DEPTH)
        for (int64_t t = 0; t < tiles; t++) { /* of about the same height: seven rows take less as 3 + 4 than as 6 + 1 */
            const int64_t first = part(rows, t, tiles), height = part(rows, t + 1, tiles) - first;
            (map->bytes == 1 ? byte_tile : map->bytes == 2 ? half_tile : full_tile)(
                height, weights + k * bytes, x + first * inputs + k, inputs, least(DEPTH, inputs - k),
                sums + first * PANEL);
        }
    const int64_t output = index * PANEL, count = least(PANEL, map->outputs - output);
    if (map->scale != 1)
        for (int64_t i = 0; i < rows * PANEL; i++)
            sums[i] *= map->scale;
    if (map->scales)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < PANEL; i++)
                sums[r * PANEL + i] *= map->scales[output + i];
    if (map->bias)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < count; i++)
                sums[r * PANEL + i] += map->bias[output + i];
}

static inline int64_t panels(const Linear *map) { return (map->outputs + PANEL - 1) / PANEL; }

/* y [rows, outputs] from x [rows, inputs], or added to y: the share of one thread.  `sums` holds CHUNK * PANEL floats. */
static void product(
    const Linear *map, const float *x, int64_t rows, float *y, int add, float *sums, int64_t id, int64_t team)
{
    const int64_t outputs = map->outputs, end = part(panels(map), id + 1, team);
    for (int64_t first = 0; first < rows; first += CHUNK) {
        const int64_t chunk = least(CHUNK, rows - first);
        for (int64_t p = part(panels(map), id, team); p < end; p++) {
            const int64_t count = least(PANEL, outputs - p * PANEL);
            panel(map, p, x + first * map->inputs, chunk, sums);
            for (int64_t r = 0; r < chunk; r++) {
                float *to = y + (first + r) * outputs + p * PANEL;
                for (int64_t i = 0; i < count; i++)
                    to[i] = sums[r * PANEL + i] + (add ? to[i] : 0);
            }
        }
    }
}

void eagle2_linear(const Linear *map, const float *x, int64_t rows, float *y, int32_t threads)
{
#pragma omp parallel num_threads(threads)
    {
        float sums[CHUNK * PANEL];
        product(map, x, rows, y, 0, sums, omp_get_thread_num(), omp_get_num_threads());
    }
}

/* ---- what lies between them ------------------------------------------------------------------------------------ */

/* Of the lanes, always in this order. */
static inline float total_of(__m256 x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* e^x to about two units in the last place (Cephes' polynomial); below -87.3 about 1e-38. */
static inline __m256 exponential(__m256 x)
{
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.3f)), _mm256_set1_ps(88.3f));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), x);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_fmadd_ps(y, _mm256_mul_ps(x, x), _mm256_add_ps(x, _mm256_set1_ps(1)));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

/* RMS norm of `size` numbers, a multiple of LANES: x * weight / sqrt(sum of squares + size * eps). */
static void normalize(const float *x, const float *weight, int64_t size, float eps, float *y)
{
    __m256 squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    __m256 root = _mm256_sqrt_ps(_mm256_set1_ps(total_of(squares) + (float)size * eps));
    for (int64_t i = 0; i < size; i += LANES)
        _mm256_storeu_ps(
            y + i, _mm256_div_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(weight + i)), root));
}

/* One head of one row: norm (where the model has one), then rotation of adjacent pairs by turns [size / 2, 2]. */
static void turn(const float *x, const float *norm, const float *turns, int64_t size, float eps, float *y)
{
    if (norm) {
        normalize(x, norm, size, eps, y);
        x = y;
    }
    for (int64_t i = 0; i < size; i += 2) {
        const float a = x[i], b = x[i + 1], cosine = turns[i], sine = turns[i + 1];
        y[i] = a * cosine - b * sine;
        y[i + 1] = a * sine + b * cosine;
    }
}

/* Products of a query with LANES keys. */
static inline __m256 scores_of(const float *query, const float *const *keys, int64_t size)
{
    __m256 s[LANES];
    UNROLLED for (int j = 0; j < LANES; j++)
        s[j] = _mm256_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        __m256 q = _mm256_loadu_ps(query + i);
        UNROLLED for (int j = 0; j < LANES; j++)
            s[j] = _mm256_fmadd_ps(q, _mm256_loadu_ps(keys[j] + i), s[j]);
    }
    __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(s[4], s[5]), _mm256_hadd_ps(s[6], s[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

/* Add `count` weighted values to y, `vectors` of their LANES numbers from `at` on. */
__attribute__((always_inline)) static inline void mix(
    const int vectors, const float *weights, const float *const *values, int64_t at, int64_t count, float *y)
{
    __m256 s[8];
    UNROLLED for (int v = 0; v < vectors; v++)
        s[v] = _mm256_loadu_ps(y + at + v * LANES);
    for (int64_t t = 0; t < count; t++) {
        __m256 weight = _mm256_broadcast_ss(weights + t);
        UNROLLED for (int v = 0; v < vectors; v++)
            s[v] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values[t] + at + v * LANES), s[v]);
    }
    UNROLLED for (int v = 0; v < vectors; v++)
        _mm256_storeu_ps(y + at + v * LANES, s[v]);
}

static void mix_all(const float *weights, const float *const *values, int64_t count, int64_t size, float *y)
{
    int64_t at = 0;
    for (; at + 8 * LANES <= size; at += 8 * LANES)
        mix(8, weights, values, at, count, y);
    for (; at < size; at += LANES)
        mix(1, weights, values, at, count, y);
}

/* Scores [padded] of one query become weights that are to be divided by what is returned. */
static float soften(float *scores, int64_t count, int64_t padded)
{
    for (int64_t t = count; t < padded; t++)
        scores[t] = -__builtin_inff(); /* will add 1e-38 to a sum that is at least 1 */
    __m256 most = _mm256_loadu_ps(scores);
    for (int64_t t = LANES; t < padded; t += LANES)
        most = _mm256_max_ps(most, _mm256_loadu_ps(scores + t));
    float lanes[LANES], highest = -__builtin_inff();
    _mm256_storeu_ps(lanes, most);
    for (int i = 0; i < LANES; i++)
        highest = lanes[i] > highest ? lanes[i] : highest;
    __m256 sum = _mm256_setzero_ps();
    for (int64_t t = 0; t < padded; t += LANES) {
        __m256 e = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + t), _mm256_set1_ps(highest)));
        sum = _mm256_add_ps(sum, e);
        _mm256_storeu_ps(scores + t, e);
    }
    return total_of(sum);
}

/* One query of a block: its scaled and rotated numbers, what it sees behind the slots that all see, where the result goes. */
typedef struct {
    const float *query;
    const int32_t *path;
    int64_t extra;
    float *y;
} Query;

/* Softmax attention of `n` queries of one key head.  All see the first `common` slots, which are read once for all of them;
 * each goes on along its own path.  `scores` has `room` for each query, `rows` for what one sees behind `common`, and LANES. */
static void attend(
    const Query *queries, int64_t n, const float *keys, const float *values, int64_t common, int64_t size,
    int64_t room, float *scores, const float **rows)
{
    const int64_t whole = common / LANES * LANES; /* a block that holds the end of what is common is each query's own */
    for (int64_t t = 0; t < whole; t += LANES) {
        const float *block[LANES];
        for (int j = 0; j < LANES; j++)
            block[j] = keys + (t + j) * size;
        for (int64_t q = 0; q < n; q++)
            _mm256_storeu_ps(scores + q * room + t, scores_of(queries[q].query, block, size));
    }
    for (int64_t q = 0; q < n; q++) {
        const int64_t count = common + queries[q].extra, padded = (count + LANES - 1) / LANES * LANES;
        for (int64_t t = whole; t < padded; t += LANES) {
            const float *block[LANES];
            for (int j = 0; j < LANES; j++) {
                const int64_t at = least(t + j, count - 1); /* padding takes the last key once more */
                block[j] = keys + (at < common ? at : queries[q].path[at - common]) * size;
            }
            _mm256_storeu_ps(scores + q * room + t, scores_of(queries[q].query, block, size));
        }
        const float sum = soften(scores + q * room, count, padded);
        for (int64_t t = 0; t < count; t++)
            scores[q * room + t] /= sum;
        memset(queries[q].y, 0, size * sizeof(float));
    }
    for (int64_t t = 0; t < whole; t += LANES) {
        const float *block[LANES];
        for (int j = 0; j < LANES; j++)
            block[j] = values + (t + j) * size;
        for (int64_t q = 0; q < n; q++)
            mix_all(scores + q * room + t, block, LANES, size, queries[q].y);
    }
    for (int64_t q = 0; q < n; q++) {
        const int64_t count = common + queries[q].extra;
        for (int64_t t = whole; t < count; t++)
            rows[t - whole] = values + (t < common ? t : queries[q].path[t - common]) * size;
        mix_all(scores + q * room + whole, rows, count - whole, size, queries[q].y);
    }
}

/* ---- a pass ---------------------------------------------------------------------------------------------------- */

/* Floats of scratch that a pass takes: shared by all threads, and for each of them. */
static int64_t shared_floats(const Blocks *b, int64_t rows)
{
    return rows * ((b->heads + 2 * b->kv_heads) * b->size + b->heads * b->size + b->inner);
}

static inline int64_t room_of(int64_t total) { return (total + LANES - 1) / LANES * LANES; }

static int64_t own_floats(const Blocks *b, int64_t rows, int64_t total, int64_t newest)
{
    /* Rows after a norm; sums of two panels; queries and their scores; pointers, two floats long; paths. */
    return rows * b->width + 2 * CHUNK * PANEL + QUERIES * (b->size + room_of(total)) + 2 * (newest + LANES) +
           rows * (newest + 1) + 2;
}

int64_t eagle2_scratch(const Blocks *b, const Pass *pass, int32_t threads)
{
    return shared_floats(b, pass->rows) + threads * own_floats(b, pass->rows, pass->total, pass->newest);
}

/* All layers over x [rows, width], and the norm behind them, in place. */
void eagle2_layers(const Blocks *b, const Pass *pass, float *x, float *scratch, int32_t threads)
{
    const int64_t n = pass->rows, size = b->size, heads = b->heads, kv_heads = b->kv_heads, groups = heads / kv_heads;
    const int64_t fused = (heads + 2 * kv_heads) * size, first = pass->total - n, common = pass->total - pass->newest;
    const float scale = 1 / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss((float)size)));
    float *qkv = scratch, *seen = qkv + n * fused, *inner = seen + n * heads * size;
#pragma omp parallel num_threads(threads)
    {
        const int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t room = room_of(pass->total), newest = pass->newest;
        char *own = (char *)(scratch + shared_floats(b, n) + id * own_floats(b, n, pass->total, newest));
        own += -(uintptr_t)own % sizeof(float *);
        const float **pointers = (const float **)own;
        int32_t *paths = (int32_t *)(pointers + newest + LANES), *extra = paths + n * newest;
        float *scores = (float *)(extra + n), *turned = scores + QUERIES * room;
        float *sums = turned + QUERIES * size, *normed = sums + 2 * CHUNK * PANEL;
        /* The slots of each row's path behind those that all see. */
        for (int64_t r = 0; r < n; r++)
            for (int64_t t = extra[r] = 0; t < newest; t++)
                if (pass->visible[r * newest + t])
                    paths[r * newest + extra[r]++] = (int32_t)(common + t);

        for (int64_t l = 0; l < b->layers; l++) {
            const Layer *layer = b->layer + l;
            float *keys = pass->kv + l * pass->layer_stride, *values = keys + kv_heads * pass->head_stride;
            const float *h = x;
            if (layer->attention_norm) {
                /* Each thread norms all rows for itself: that costs less than to wait for the others. */
                for (int64_t r = 0; r < n; r++)
                    normalize(x + r * b->width, layer->attention_norm, b->width, b->eps, normed + r * b->width);
                h = normed;
            }
            product(&layer->qkv, h, n, qkv, 0, sums, id, team);
#pragma omp barrier
            for (int64_t i = part(n * kv_heads, id, team); i < part(n * kv_heads, id + 1, team); i++) {
                const int64_t r = i / kv_heads, head = i % kv_heads;
                const float *key = qkv + r * fused + (heads + head) * size;
                const int64_t slot = head * pass->head_stride + (first + r) * size;
                turn(key, layer->key_norm, pass->turns + r * size, size, b->eps, keys + slot);
                memcpy(values + slot, key + kv_heads * size, size * sizeof(float));
            }
#pragma omp barrier
            /* Queries in the order of their key heads, so that a thread's share reads few keys. */
            const int64_t each = n * groups, end = part(kv_heads * each, id + 1, team);
            for (int64_t i = part(kv_heads * each, id, team), next; i < end; i = next) {
                const int64_t head = i / each, shift = head * pass->head_stride;
                Query queries[QUERIES];
                next = least(least(end, (head + 1) * each), i + QUERIES);
                for (int64_t q = i; q < next; q++) {
                    const int64_t r = q % each / groups, of = head * groups + q % groups;
                    float *query = turned + (q - i) * size;
                    turn(qkv + r * fused + of * size, layer->query_norm, pass->turns + r * size, size, b->eps, query);
                    for (int64_t j = 0; j < size; j++)
                        query[j] *= scale;
                    queries[q - i] = (Query){query, paths + r * newest, extra[r], seen + (r * heads + of) * size};
                }
                attend(queries, next - i, keys + shift, values + shift, common, size, room, scores, pointers);
            }
#pragma omp barrier
            product(&layer->out, seen, n, x, 1, sums, id, team);
#pragma omp barrier
            for (int64_t r = 0; r < n; r++)
                normalize(x + r * b->width, layer->mlp_norm, b->width, b->eps, normed + r * b->width);
            const int64_t half = b->inner / PANEL; /* panels of the gate; those of the other factor follow */
            for (int64_t begin = 0; begin < n; begin += CHUNK) {
                const int64_t chunk = least(CHUNK, n - begin);
                for (int64_t p = part(half, id, team); p < part(half, id + 1, team); p++) {
                    float *gate = sums, *up = sums + CHUNK * PANEL;
                    panel(&layer->gate_up, p, normed + begin * b->width, chunk, gate);
                    panel(&layer->gate_up, p + half, normed + begin * b->width, chunk, up);
                    for (int64_t r = 0; r < chunk; r++)
                        for (int64_t i = 0; i < PANEL; i += LANES) {
                            __m256 g = _mm256_loadu_ps(gate + r * PANEL + i), u = _mm256_loadu_ps(up + r * PANEL + i);
                            __m256 one = _mm256_set1_ps(1), minus = _mm256_sub_ps(_mm256_setzero_ps(), g);
                            __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, exponential(minus)));
                            _mm256_storeu_ps(inner + (begin + r) * b->inner + p * PANEL + i, _mm256_mul_ps(silu, u));
                        }
                }
            }
#pragma omp barrier
            product(&layer->down, inner, n, x, 1, sums, id, team);
#pragma omp barrier
        }
        if (b->final_norm)
            for (int64_t r = part(n, id, team); r < part(n, id + 1, team); r++)
                normalize(x + r * b->width, b->final_norm, b->width, b->eps, x + r * b->width);
    }
}

/* ---- the highest of a row -------------------------------------------------------------------------------------- */

/* The `k` highest of x [n] in descending order, the first of equals first; NaN where x holds one. */
static void highest(const float *x, int64_t n, int64_t k, float *values, int64_t *ids)
{
    int64_t held = 0, i = 0;
    int missing = 0;
    while (i < n) {
        if (held == k && i + LANES <= n) { /* most have nothing to offer: pass over LANES of them at once */
            const __m256 v = _mm256_loadu_ps(x + i);
            missing |= _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
            if (!_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(values[k - 1]), _CMP_GT_OQ))) {
                i += LANES;
                continue;
            }
        }
        const int64_t end = held == k ? least(i + LANES, n) : i + 1;
        for (; i < end; i++) {
            missing |= x[i] != x[i];
            if (held == k && !(x[i] > values[k - 1]))
                continue;
            int64_t at = held < k ? held++ : k - 1;
            for (; at && x[i] > values[at - 1]; at--) {
                values[at] = values[at - 1];
                ids[at] = ids[at - 1];
            }
            values[at] = x[i];
            ids[at] = i;
        }
    }
    if (missing)
        for (int64_t j = 0; j < k; j++)
            values[j] = __builtin_nanf("");
}

/* Logarithm of the sum of e^x, by its highest element. */
static float log_sum(const float *x, int64_t n, float most)
{
    __m256 sum = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum = _mm256_add_ps(sum, exponential(_mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(most))));
    float rest = total_of(sum);
    for (; i < n; i++)
        rest += __builtin_expf(x[i] - most);
    return most + __builtin_logf(rest);
}

/* For each row of x [rows, n] its `k` highest, k <= n; `softmax`: of its log-softmax. */
void eagle2_top(
    const float *x, int64_t rows, int64_t n, int64_t k, int32_t softmax, float *values, int64_t *ids, int32_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        highest(x + r * n, n, k, values + r * k, ids + r * k);
        if (softmax) {
            const float sum = log_sum(x + r * n, n, values[r * k]);
            for (int64_t j = 0; j < k; j++)
                values[r * k + j] -= sum;
        }
    }
}
