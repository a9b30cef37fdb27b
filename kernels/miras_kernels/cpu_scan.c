/* The tiles of a memory's scan for CPUs, one lane (row and head) at a time; the wrapper is cpu_scan.py.

Compiled once with -DREAL=float -DSINGLE and once with -DREAL=double. Letters and formulas are those of
miras_megatron/memory/fused_tile.py (forward) and fused_backward.py (R, U and A); matrix i maps in_i to out_i, its
state is [W; S] as [r, out, in], r = 2 with momentum. Tokens, rows c of a tile, lie in the caller's [B, T, N, D] and
are read and written there. All else is contiguous. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE__
#include <immintrin.h>
#endif

#define PRAGMA(x) _Pragma(#x)
#define EACH PRAGMA(omp simd)
#define SUM(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define DEEPEST 4
#define EPS ((REAL)1e-5)
typedef int64_t size;
/* BLAS's integers have 32 bits or 64; little-endian numbers of 64 bits serve both. */
typedef void (*Gemm)(const char *, const char *, const size *, const size *, const size *, const REAL *, const REAL *,
                     const size *, const REAL *, const size *, const REAL *, REAL *, const size *);

/* A token tensor of one lane, or its gradient: row t at first + t * apart. */
typedef struct {
    REAL *first;
    size apart;
} Rows;

/* One matrix's gates, a value a token, or their gradients; first is null where a rule has none. */
typedef struct {
    Rows log_keep, momentum, rate;
} Gates;

/* One lane of neighbouring tiles of c tokens each. */
typedef struct {
    Gemm gemm;
    size depth, r, tiles, c, widths[DEEPEST + 1];
    size dot, folds;           /* the objective is the dot product; the memory has its residual folded in */
    size ends_walk;            /* what comes after the last tile isn't wanted */
    double floor, least;       /* products of gates: logs below `floor` count as it, and products up to `least` as 0 */
    const uint8_t *opens, *ends; /* [J]: whether tile j opens, and whether it ends its chunk */
    Rows key, query, value, reads;
    Gates gates[DEEPEST];
    const REAL *norm_weight, *norm_bias; /* [D], null without layer norm */
    REAL *stacks[DEEPEST];     /* the state, walked in place */
    REAL *anchor[DEEPEST];     /* the open chunk's first W [out, in] */
    REAL *kept;                /* room for J tiles, see kept_elements; null where nothing is kept */
    REAL *scratch;             /* room, see scratch_elements */
    /* backward */
    Rows dkey, dquery, dvalue, dreads;
    Gates dgates[DEEPEST];
    REAL *dnorm_weight, *dnorm_bias;
    REAL *dstacks[DEEPEST], *danchor[DEEPEST];
} Lane;

/* Subnormal numbers slow every product that meets them tenfold, and in memories of three or four matrices gradients
become so small: while a run is walked they are 0. Returns what `unflush` sets back. */
static unsigned flush_subnormals(void)
{
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}
static void unflush(unsigned before)
{
#ifdef __SSE__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

static const REAL ROOT_HALF = (REAL)0.70710678118654752440, ROOT_TWO_PI = (REAL)0.39894228040143267794;

#ifdef SINGLE
/* exp of x in [-87, 88] by Cody and Waite's reduction, x = k log 2 + f, and a polynomial of f; half has x's sign. */
static inline float exponential_by(float x, float half)
{
    int32_t whole = (int32_t)(x * 1.44269504088896341f + half);
    float k = (float)whole;
    float f = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    union { int32_t bits; float value; } power = {(whole + 127) << 23};
    return p * power.value;
}

/* exp of x <= 0; exp(-87) below -87 */
static inline float exponential(float x) { return exponential_by(x < -87.0f ? -87.0f : x, -0.5f); }

/* exp, exp(88) above 88 */
static inline float growth(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    return exponential_by(x, x > 0 ? 0.5f : -0.5f);
}

/* erf as a ratio of polynomials on [-4, 4], 1 beyond. */
static inline float error_function(float x)
{
    x = x < -4.0f ? -4.0f : x > 4.0f ? 4.0f : x;
    float y = x * x;
    float p = -2.72614225801306e-10f;
    p = p * y + 2.77068142495902e-08f;
    p = p * y - 2.10102402082508e-06f;
    p = p * y - 5.69250639462346e-05f;
    p = p * y - 7.34990630326855e-04f;
    p = p * y - 2.95459980854025e-03f;
    p = p * y - 1.60960333262415e-02f;
    float q = -1.45660718464996e-05f;
    q = q * y - 2.13374055278905e-04f;
    q = q * y - 1.68282697438203e-03f;
    q = q * y - 7.37332916720468e-03f;
    q = q * y - 1.42647390514189e-02f;
    return x * p / q;
}
#else
static inline double exponential(double x) { return exp(x); }
static inline double growth(double x) { return exp(x); }
static inline double error_function(double x) { return erf(x); }
#endif

/* gelu(z) = z Phi(z), gelu'(z) = Phi(z) + z phi(z), gelu''(z) = phi(z) (2 - z^2) */
static inline REAL normal_cdf(REAL z) { return (REAL)0.5 * ((REAL)1.0 + error_function(z * ROOT_HALF)); }
static inline REAL normal_density(REAL z) { return ROOT_TWO_PI * exponential((REAL)-0.5 * z * z); }

static void gelu(size count, const REAL *restrict z, REAL *restrict x)
{
    EACH for (size i = 0; i < count; i++) x[i] = z[i] * normal_cdf(z[i]);
}

/* v = d gelu'(z); v may be d */
static void gelu_backward(size count, const REAL *d, const REAL *restrict z, REAL *v)
{
    EACH for (size i = 0; i < count; i++) v[i] = d[i] * (normal_cdf(z[i]) + z[i] * normal_density(z[i]));
}

/* x = gelu(z), slope = gelu'(z), v = into slope */
static void refresh(size count, const REAL *restrict z, const REAL *restrict into, REAL *restrict x, REAL *restrict v,
                    REAL *restrict slope)
{
    EACH for (size i = 0; i < count; i++) {
        REAL cdf = normal_cdf(z[i]), s = cdf + z[i] * normal_density(z[i]);
        x[i] = z[i] * cdf;
        slope[i] = s;
        v[i] = into[i] * s;
    }
}

/* dz = dx slope + dv into gelu''(z), in dx */
static void bend(size count, const REAL *restrict z, const REAL *restrict into, const REAL *restrict slope,
                 const REAL *restrict dv, REAL *restrict dx)
{
    EACH for (size i = 0; i < count; i++)
        dx[i] = dx[i] * slope[i] + dv[i] * into[i] * normal_density(z[i]) * ((REAL)2.0 - z[i] * z[i]);
}

/* ---- one row of width D ------------------------------------------------------------------------------------------ */

/* unit = (z - mean) s; returns s = 1 / std */
static inline REAL normalise(size width, const REAL *restrict z, REAL *restrict unit)
{
    REAL mean = 0, square = 0;
    SUM(mean) for (size i = 0; i < width; i++) mean += z[i];
    mean /= width;
    SUM(square) for (size i = 0; i < width; i++) square += (z[i] - mean) * (z[i] - mean);
    REAL s = (REAL)1.0 / (REAL)sqrt(square / width + EPS);
    EACH for (size i = 0; i < width; i++) unit[i] = (z[i] - mean) * s;
    return s;
}

/* dz = s (d - mean(d) - unit mean(d unit)); dz may be d */
static inline void pull(size width, REAL s, const REAL *restrict unit, const REAL *d, REAL *dz)
{
    REAL mean = 0, along = 0;
    SUM(mean, along) for (size i = 0; i < width; i++) mean += d[i], along += d[i] * unit[i];
    mean /= width, along /= width;
    EACH for (size i = 0; i < width; i++) dz[i] = s * (d[i] - mean - unit[i] * along);
}

/* dZ of N = LN(Z) and U = s (P - mean(P) - N mean(P N)) from dU = dtop and dN, in dunit; top = -U */
static inline void pull_backward(size width, REAL s, const REAL *restrict unit, const REAL *restrict p,
                                 const REAL *restrict dtop, const REAL *restrict top, REAL *restrict dunit)
{
    REAL weighted = 0, slope = 0, along = 0, mean = 0, slant = 0;
    SUM(weighted, slope, along) for (size i = 0; i < width; i++)
        weighted += p[i] * unit[i], slope += dtop[i] * unit[i], along += dtop[i] * top[i];
    weighted *= s / width, slope *= s / width, along *= s / width;
    EACH for (size i = 0; i < width; i++) dunit[i] -= dtop[i] * weighted + p[i] * slope;
    SUM(mean, slant) for (size i = 0; i < width; i++) mean += dunit[i], slant += dunit[i] * unit[i];
    mean /= width, slant = slant * s / width - along;
    EACH for (size i = 0; i < width; i++) dunit[i] = s * (dunit[i] - mean) - unit[i] * slant;
}

/* ---- gates on rows and on the state ------------------------------------------------------------------------------ */

/* z = sum over r of by_r parts_r; parts [c, r, width] */
static void combine(size c, size r, size width, const REAL *restrict parts, const REAL *restrict by, REAL *restrict z)
{
    for (size t = 0; t < c; t++, parts += r * width, by += r, z += width)
        if (r == 2) EACH for (size i = 0; i < width; i++) z[i] = by[0] * parts[i] + by[1] * parts[width + i];
        else EACH for (size i = 0; i < width; i++) z[i] = by[0] * parts[i];
}

/* out = [by_0 rows | by_1 rows]; out [c, r, width] */
static void scale(size c, size r, size width, const REAL *restrict rows, const REAL *restrict by, REAL *restrict out)
{
    for (size t = 0; t < c; t++, rows += width, by += r)
        for (size k = 0; k < r; k++, out += width) EACH for (size i = 0; i < width; i++) out[i] = by[k] * rows[i];
}

/* dby_r = <parts_r, rows>, and unless null drows = sum over r of by_r parts_r; then parts_r = by_r rows */
static void scale_backward(size c, size r, size width, const REAL *restrict rows, const REAL *restrict by,
                           REAL *restrict parts, REAL *restrict dby, REAL *restrict drows)
{
    for (size t = 0; t < c; t++, rows += width, by += r, dby += r) {
        if (drows) combine(1, r, width, parts, by, drows + t * width);
        for (size k = 0; k < r; k++, parts += width) {
            REAL found = 0;
            SUM(found) for (size i = 0; i < width; i++) found += parts[i] * rows[i], parts[i] = by[k] * rows[i];
            dby[k] = found;
        }
    }
}

/* [W; S] = carry [W; S]; carry [r, r] = ((b, f), (0, e)) */
static void carry(size r, size count, const REAL *restrict by, const REAL *from, REAL *to)
{
    if (r == 1) EACH for (size i = 0; i < count; i++) to[i] = by[0] * from[i];
    else EACH for (size i = 0; i < count; i++) {
        REAL w = from[i], s = from[count + i];
        to[i] = by[0] * w + by[1] * s;
        to[count + i] = by[3] * s;
    }
}

/* dstack = carry^T dstack, in place, and dcarry = dstack stack^T without what its zero would get */
static void carry_backward(size r, size count, const REAL *restrict by, const REAL *restrict stack,
                           REAL *restrict dstack, REAL *restrict dby)
{
    REAL db = 0, df = 0, de = 0;
    if (r == 1) {
        SUM(db) for (size i = 0; i < count; i++) db += dstack[i] * stack[i], dstack[i] *= by[0];
    } else {
        SUM(db, df, de) for (size i = 0; i < count; i++) {
            REAL w = dstack[i], s = dstack[count + i];
            db += w * stack[i], df += w * stack[count + i], de += s * stack[count + i];
            dstack[i] = by[0] * w;
            dstack[count + i] = by[1] * w + by[3] * s;
        }
        dby[1] = df, dby[2] = 0, dby[3] = de;
    }
    dby[0] = db;
}

/* c = op(a) op(b) + beta c for row-major matrices [m, k], [k, n]; a or b is transposed where its letter is T */
static void product(const Lane *lane, const char *letters, size m, size n, size k, const REAL *a, size a_apart,
                    const REAL *b, size b_apart, REAL beta, REAL *c)
{
    REAL one = 1;
    lane->gemm(letters + 1, letters, &n, &m, &k, &one, b, &b_apart, a, &a_apart, &beta, c, &n);
}

static inline Rows rows_of(REAL *first, size width) { return (Rows){first, width}; }
static inline Rows tile_rows(Rows all, size j, size c) { return (Rows){all.first + j * c * all.apart, all.apart}; }

/* ---- products of gates ------------------------------------------------------------------------------------------- */

/* One matrix's weights in a tile, or their gradients (fused_scalars.py). */
typedef struct {
    REAL *read, *write, *carry, *end; /* [c, r], [c, c], [r, r], [c, r] */
} Scalars;

/* P of a gate: start[t] = P[t, 0], within[t, j] = P[t, j] for t, j >= 1, 0 above the diagonal. */
typedef struct {
    REAL *start, *within; /* [c], [c, c] */
} Products;

/* exp(x), 0 at the floor: subnormal numbers would slow every product that meets them tenfold. Gates above 1 grow what
they act on, as in log_products and the oracle. */
static inline REAL flushed(double x, REAL floor, REAL least)
{
    REAL at = (REAL)x;
    at = growth(at < floor ? floor : at);
    return at <= least ? 0 : at;
}

/* Sums are differences of running sums in double; a gate of 0 is a log below the floor, so nothing is infinite. */
static void gate_products(const Lane *lane, Rows gate, size is_log, double *restrict sums, Products to)
{
    size c = lane->c;
    REAL floor = (REAL)lane->floor, least = (REAL)lane->least;
    double sum = 0;
    for (size t = 0; t < c; t++) {
        double given = gate.first ? (double)gate.first[t * gate.apart] : 0, log_gate = is_log ? given : log(given);
        sum += log_gate < 2 * lane->floor ? 2 * lane->floor : log_gate;
        sums[t] = sum;
    }
    EACH for (size t = 0; t < c; t++) to.start[t] = flushed(sums[t], floor, least);
    for (size t = 0; t < c; t++) {
        REAL *restrict row = to.within + t * c;
        EACH for (size j = 0; j <= t; j++) row[j] = flushed(sums[t] - sums[j], floor, least);
        for (size j = t + 1; j < c; j++) row[j] = 0;
    }
}

/* y = m x, or m^T x, for m [c, c] */
static void apply(size c, const REAL *restrict m, const REAL *restrict x, size x_apart, REAL *restrict y)
{
    for (size t = 0; t < c; t++) {
        REAL sum = 0;
        SUM(sum) for (size j = 0; j <= t; j++) sum += m[t * c + j] * x[j * x_apart];
        y[t] = sum;
    }
}
static void apply_transposed(size c, const REAL *restrict m, const REAL *restrict x, size x_apart, REAL *restrict y)
{
    memset(y, 0, sizeof(REAL) * c);
    for (size t = 0; t < c; t++) EACH for (size j = 0; j <= t; j++) y[j] += m[t * c + j] * x[t * x_apart];
}

/* One matrix's gates in a tile: their products, `both` = P_a P_m, and what is made of them. */
typedef struct {
    Products keep, momentum;
    REAL *both; /* [c, c] */
    Scalars scalars;
} Gated;

static void gated_forward(const Lane *lane, const Gates *gates, size j, double *sums, REAL *spare, Gated *to)
{
    size c = lane->c, r = lane->r;
    Rows rate = tile_rows(gates->rate, j, c);
    Scalars *s = &to->scalars;
    gate_products(lane, tile_rows(gates->log_keep, j, c), 1, sums, to->keep);
    for (size t = 0; t < c; t++) s->read[t * r] = to->keep.start[t];
    if (r == 2) {
        gate_products(lane, tile_rows(gates->momentum, j, c), 0, sums, to->momentum);
        product(lane, "NN", c, c, c, to->keep.within, c, to->momentum.within, c, 0, to->both);
        apply(c, to->keep.within, to->momentum.start, 1, spare);
        for (size t = 0; t < c; t++) s->read[t * r + 1] = spare[t];
    }
    for (size t = 0; t < c; t++) spare[t] = rate.first[t * rate.apart];
    for (size t = 0; t < c; t++)
        EACH for (size i = 0; i < c; i++) s->write[t * c + i] = to->both[t * c + i] * spare[i];
    const REAL *read = s->read + (c - 1) * r, *write = s->write + (c - 1) * c;
    s->carry[0] = read[0];
    if (r == 2) s->carry[1] = read[1], s->carry[2] = 0, s->carry[3] = to->momentum.start[c - 1];
    for (size t = 0; t < c; t++) {
        s->end[t * r] = write[t];
        if (r == 2) s->end[t * r + 1] = to->momentum.within[(c - 1) * c + t] * spare[t];
    }
}

/* dl/da_t, the subdiagonal of P^T dP P^T, or dl/dlog a_t; what dwithin holds above its diagonal isn't read */
static void gate_gradient(const Lane *lane, Products p, const REAL *dstart, size dstart_apart, const REAL *dwithin,
                          size is_log, REAL *inner, REAL *restrict da)
{
    size c = lane->c;
    product(lane, "NT", c, c, c, dwithin, c, p.within, c, 0, inner);
    memset(da, 0, sizeof(REAL) * c);
    for (size t = 0; t < c; t++) {
        const REAL d = dstart[t * dstart_apart], *within = p.within + t * c, *row = inner + t * c;
        da[0] += within[0] * d;
        EACH for (size i = 0; i < t; i++) da[i + 1] += within[i + 1] * (row[i] + d * p.start[i]);
    }
    for (size t = 0; is_log && t < c; t++) da[t] *= t ? p.within[t * c + t - 1] : p.start[0];
}

static void gate_out(Rows gate, size c, const REAL *da)
{
    for (size t = 0; gate.first && t < c; t++) gate.first[t * gate.apart] = da[t];
}

/* The gates' gradients from those of the tile's weights (consumed); room for 2 c c + 4 c. */
static void gated_backward(const Lane *lane, const Gates *gates, const Gates *dgates, size j, const Gated *from,
                           Scalars d, REAL *room)
{
    size c = lane->c, r = lane->r;
    REAL *inner = room, *dm = inner + c * c, *rate = dm + c * c, *drate = rate + c, *da = drate + c, *dstart = da + c;
    Rows given = tile_rows(gates->rate, j, c);
    const Products keep = from->keep, momentum = from->momentum;
    for (size t = 0; t < c; t++) rate[t] = given.first[t * given.apart];
    for (size k = 0; k < r; k++) d.read[(c - 1) * r + k] += d.carry[k];
    for (size t = 0; t < c; t++) d.write[(c - 1) * c + t] += d.end[t * r];
    memset(drate, 0, sizeof(REAL) * c);
    for (size t = 0; t < c; t++)
        EACH for (size i = 0; i < c; i++) {
            drate[i] += d.write[t * c + i] * from->both[t * c + i];
            d.write[t * c + i] *= rate[i];
        }
    const REAL *dkeep = d.write;
    if (r == 2) {
        const REAL *last = momentum.within + (c - 1) * c;
        for (size t = 0; t < c; t++) drate[t] += d.end[t * 2 + 1] * last[t];
        product(lane, "TN", c, c, c, keep.within, c, d.write, c, 0, dm);
        for (size t = 0; t < c; t++) dm[(c - 1) * c + t] += d.end[t * 2 + 1] * rate[t];
        apply_transposed(c, keep.within, d.read + 1, 2, dstart);
        dstart[c - 1] += d.carry[3];
        gate_gradient(lane, momentum, dstart, 1, dm, 0, inner, da);
        gate_out(tile_rows(dgates->momentum, j, c), c, da);
        product(lane, "NT", c, c, c, d.write, c, momentum.within, c, 0, dm);
        for (size t = 0; t < c; t++)
            EACH for (size i = 0; i < c; i++) dm[t * c + i] += d.read[t * 2 + 1] * momentum.start[i];
        dkeep = dm;
    }
    gate_gradient(lane, keep, d.read, r, dkeep, 1, inner, da);
    gate_out(tile_rows(dgates->log_keep, j, c), c, da);
    gate_out(tile_rows(dgates->rate, j, c), c, drate);
}

/* ---- a tile ------------------------------------------------------------------------------------------------------ */

/* What a tile's forward leaves for its backward, and what is written anew for each tile. */
typedef struct {
    REAL *stacks[DEEPEST];                     /* kept: the state at the tile's start */
    REAL *pre[DEEPEST], *into[DEEPEST];        /* kept: Z_i and V_{i+1} W_{i+1} of hidden activations */
    REAL *top, *unit, *rstd, *signal;          /* kept: V of the last matrix, its LN and g(e) */
    REAL *inputs[DEEPEST], *writes[DEEPEST];   /* X_i, V_i; X_0 is the key, V of the last is top */
    REAL *asked[DEEPEST], *parts[DEEPEST], *scores[DEEPEST], *mixed[DEEPEST], *answered[DEEPEST]; /* the read */
    REAL *read_unit, *read_rstd;
    REAL *slopes[DEEPEST], *dinputs[DEEPEST], *dwrites[DEEPEST], *dinto[DEEPEST];
    REAL *across, *dhidden, *drows, *dtop, *dtarget;
    REAL *dnorm_weight, *dnorm_bias;           /* of this tile alone: a long row's sum would lose digits */
    Gated gated[DEEPEST];                      /* matrices with the same gates share them */
    Scalars dscalars[DEEPEST];
    double *sums;
    REAL *spare;
} Tile;

static inline size in(const Lane *lane, size i) { return lane->widths[i]; }
static inline size out(const Lane *lane, size i) { return lane->widths[i + 1]; }
static inline REAL *take(REAL **room, size count)
{
    REAL *mine = *room;
    *room += (count + 15) / 16 * 16;
    return mine;
}

/* Lays out what is kept of a tile from `room` on; returns where it ends. */
static REAL *lay_kept(const Lane *lane, Tile *tile, REAL *room, size with_state)
{
    size last = lane->depth - 1, c = lane->c, width = out(lane, last);
    for (size i = 0; with_state && i <= last; i++)
        tile->stacks[i] = take(&room, lane->r * out(lane, i) * in(lane, i));
    for (size i = 0; i < last; i++)
        tile->pre[i] = take(&room, c * out(lane, i)), tile->into[i] = take(&room, c * out(lane, i));
    tile->top = take(&room, c * width), tile->signal = take(&room, c * width);
    tile->unit = take(&room, c * width), tile->rstd = take(&room, c);
    return room;
}

static Scalars lay_scalars(const Lane *lane, REAL **room)
{
    size c = lane->c, r = lane->r;
    return (Scalars){take(room, c * r), take(room, c * c), take(room, r * r), take(room, c * r)};
}

/* The first matrix whose gates are those of matrix i. */
static size twin(const Lane *lane, size i)
{
    for (size k = 0; k < i; k++)
        if (!memcmp(&lane->gates[k], &lane->gates[i], sizeof(Gates))) return k;
    return i;
}

static REAL *lay_gated(const Lane *lane, Tile *tile, REAL *room)
{
    size c = lane->c;
    for (size i = 0; i < lane->depth; i++) {
        tile->dscalars[i] = lay_scalars(lane, &room);
        /* room for every matrix, since lanes of one call may differ in which of them are twins */
        Products keep = {take(&room, c), take(&room, c * c)}, momentum = {take(&room, c), take(&room, c * c)};
        REAL *both = lane->r == 2 ? take(&room, c * c) : keep.within;
        tile->gated[i] = (Gated){keep, momentum, both, lay_scalars(lane, &room)};
        if (twin(lane, i) != i) tile->gated[i] = tile->gated[twin(lane, i)];
    }
    tile->sums = (double *)take(&room, 2 * c);
    tile->spare = take(&room, 2 * c * c + 4 * c);
    return room;
}

static void gates_forward(const Lane *lane, Tile *tile, size j)
{
    for (size i = 0; i < lane->depth; i++)
        if (twin(lane, i) == i) gated_forward(lane, &lane->gates[i], j, tile->sums, tile->spare, &tile->gated[i]);
}

static void gates_backward(const Lane *lane, Tile *tile, size j)
{
    for (size i = 0; i < lane->depth; i++)
        gated_backward(lane, &lane->gates[i], &lane->dgates[i], j, &tile->gated[i], tile->dscalars[i], tile->spare);
}

static REAL *lay_scratch(const Lane *lane, Tile *tile, REAL *room)
{
    size c = lane->c, widest = 0;
    for (size i = 0; i < lane->depth; i++) {
        size from = in(lane, i), to = out(lane, i);
        widest = to > widest ? to : widest, widest = from > widest ? from : widest;
        tile->inputs[i] = take(&room, c * from), tile->writes[i] = take(&room, c * to);
        tile->asked[i] = take(&room, c * from), tile->parts[i] = take(&room, c * lane->r * to);
        tile->scores[i] = take(&room, c * c), tile->mixed[i] = take(&room, c * c);
        tile->answered[i] = take(&room, c * to), tile->slopes[i] = take(&room, c * to);
        tile->dinputs[i] = take(&room, c * from), tile->dwrites[i] = take(&room, c * to);
        tile->dinto[i] = take(&room, c * to);
    }
    tile->read_unit = take(&room, c * widest), tile->read_rstd = take(&room, c);
    tile->across = take(&room, c * c), tile->dhidden = take(&room, 2 * c * widest);
    tile->drows = take(&room, c * widest), tile->dtop = take(&room, c * widest);
    tile->dtarget = take(&room, c * widest);
    tile->dnorm_weight = take(&room, widest), tile->dnorm_bias = take(&room, widest);
    return lay_gated(lane, tile, room);
}

size kept_elements(const Lane *lane)
{
    Tile tile;
    return lane->tiles * (size)(lay_kept(lane, &tile, (REAL *)0, 1) - (REAL *)0);
}

size scratch_elements(const Lane *lane)
{
    Tile tile;
    REAL *room = lay_kept(lane, &tile, (REAL *)0, 0);
    return (size)(lay_scratch(lane, &tile, room) - (REAL *)0);
}

size lane_bytes(void) { return sizeof(Lane); }

/* The target's row t: v - k with the residual folded in, else v. */
static inline void target_row(const Lane *lane, Rows key, Rows value, size t, size width, REAL *target)
{
    const REAL *v = value.first + t * value.apart, *k = key.first + t * key.apart;
    if (lane->folds && !lane->dot) EACH for (size i = 0; i < width; i++) target[i] = v[i] - k[i];
    else EACH for (size i = 0; i < width; i++) target[i] = v[i];
}

/* From Z of the last matrix in `top`: its LN, g(e) and V = -dl/dZ in its place. */
static void anchor_top(const Lane *lane, Tile *tile, Rows key, Rows value)
{
    size width = out(lane, lane->depth - 1);
    const REAL *weight = lane->norm_weight, *bias = lane->norm_bias;
    for (size t = 0; t < lane->c; t++) {
        REAL *z = tile->top + t * width, *signal = tile->signal + t * width, *unit = tile->unit + t * width;
        target_row(lane, key, value, t, width, signal);
        if (weight) tile->rstd[t] = normalise(width, z, unit);
        EACH for (size i = 0; i < width; i++) {
            REAL prediction = weight ? bias[i] + unit[i] * weight[i] : z[i];
            signal[i] = lane->dot ? -signal[i] : prediction - signal[i];
            z[i] = weight ? -signal[i] * weight[i] : -signal[i];
        }
        if (weight) pull(width, tile->rstd[t], unit, z, z);
    }
}

/* A, forward: the inner gradients of the tile at the chunk's first weights. */
static void anchor_forward(const Lane *lane, Tile *tile, REAL *const *anchor, Rows key, Rows value)
{
    size last = lane->depth - 1, c = lane->c;
    Rows x = key;
    for (size i = 0; i <= last; i++) {
        REAL *z = i < last ? tile->pre[i] : tile->top;
        product(lane, "NT", c, out(lane, i), in(lane, i), x.first, x.apart, anchor[i], in(lane, i), 0, z);
        if (i == last) break;
        gelu(c * out(lane, i), z, tile->inputs[i + 1]);
        x = rows_of(tile->inputs[i + 1], out(lane, i));
    }
    anchor_top(lane, tile, key, value);
    const REAL *v = tile->top;
    for (size i = last; i-- > 0; v = tile->writes[i]) {
        size width = out(lane, i), above = out(lane, i + 1);
        product(lane, "NN", c, width, above, v, above, anchor[i + 1], width, 0, tile->into[i]);
        gelu_backward(c * width, tile->into[i], tile->pre[i], tile->writes[i]);
    }
}

static inline Rows input_of(const Lane *lane, const Tile *tile, Rows key, size i)
{
    return i ? rows_of(tile->inputs[i], in(lane, i)) : key;
}
static inline REAL *write_of(const Lane *lane, const Tile *tile, size i)
{
    return i < lane->depth - 1 ? tile->writes[i] : tile->top;
}

/* R, forward: net reads, before the LN, with the running weights of every token; left in `answered` of the last. */
static void read_forward(const Lane *lane, Tile *tile, REAL *const *stacks, Rows key,
                         Rows query)
{
    size c = lane->c, r = lane->r;
    Rows h = query;
    for (size i = 0; i < lane->depth; i++) {
        size width = out(lane, i), from = in(lane, i);
        Rows x = input_of(lane, tile, key, i);
        if (i) gelu(c * from, tile->answered[i - 1], tile->asked[i]), h = rows_of(tile->asked[i], from);
        product(lane, "NT", c, r * width, from, h.first, h.apart, stacks[i], from, 0, tile->parts[i]);
        product(lane, "NT", c, c, from, h.first, h.apart, x.first, x.apart, 0, tile->scores[i]);
        const Scalars *scalars = &tile->gated[i].scalars;
        EACH for (size k = 0; k < c * c; k++) tile->mixed[i][k] = scalars->write[k] * tile->scores[i][k];
        combine(c, r, width, tile->parts[i], scalars->read, tile->answered[i]);
        product(lane, "NN", c, width, c, tile->mixed[i], c, write_of(lane, tile, i), width, 1, tile->answered[i]);
    }
}

/* The reads of the tile where the caller wants them: the LN of `answered`, and the residual. */
static void read_out(const Lane *lane, Tile *tile, Rows query, Rows reads)
{
    size last = lane->depth - 1, width = out(lane, last);
    const REAL *weight = lane->norm_weight, *bias = lane->norm_bias;
    for (size t = 0; t < lane->c; t++) {
        const REAL *z = tile->answered[last] + t * width, *q = query.first + t * query.apart;
        REAL *unit = tile->read_unit, *y = reads.first + t * reads.apart;
        if (weight) normalise(width, z, unit);
        EACH for (size i = 0; i < width; i++) {
            REAL net = weight ? bias[i] + unit[i] * weight[i] : z[i];
            y[i] = lane->folds ? net + q[i] : net;
        }
    }
}

/* U, forward: [W; S] of every matrix after the tile, from `from` into `to`, which may be the same. */
static void update_forward(const Lane *lane, Tile *tile, REAL *const *from, REAL *const *to,
                           Rows key)
{
    size c = lane->c, r = lane->r;
    for (size i = 0; i < lane->depth; i++) {
        size width = out(lane, i), inner = in(lane, i);
        Rows x = input_of(lane, tile, key, i);
        carry(r, width * inner, tile->gated[i].scalars.carry, from[i], to[i]);
        scale(c, r, width, write_of(lane, tile, i), tile->gated[i].scalars.end, tile->parts[i]);
        product(lane, "TN", r * width, inner, c, tile->parts[i], r * width, x.first, x.apart, 1, to[i]);
    }
}

/* The weights that tile j's inner gradients are taken at: the running ones where a chunk opens. */
static REAL *const *open_chunk(const Lane *lane, size j, REAL *const *stacks)
{
    if (!lane->opens[j]) return lane->anchor;
    for (size i = 0; !lane->ends[j] && i < lane->depth; i++)
        memcpy(lane->anchor[i], stacks[i], sizeof(REAL) * out(lane, i) * in(lane, i));
    return stacks;
}

/* Walks the tiles: state and anchor in place, reads written out. */
void scan_forward(const Lane *lane)
{
    unsigned before = flush_subnormals();
    Tile tile;
    lay_scratch(lane, &tile, lay_kept(lane, &tile, lane->scratch, 0));
    for (size j = 0; j < lane->tiles; j++) {
        Rows key = tile_rows(lane->key, j, lane->c), query = tile_rows(lane->query, j, lane->c);
        Rows value = tile_rows(lane->value, j, lane->c);
        gates_forward(lane, &tile, j);
        anchor_forward(lane, &tile, open_chunk(lane, j, lane->stacks), key, value);
        read_forward(lane, &tile, lane->stacks, key, query);
        read_out(lane, &tile, query, tile_rows(lane->reads, j, lane->c));
        update_forward(lane, &tile, lane->stacks, lane->stacks, key);
    }
    unflush(before);
}

/* Lays out tile j among what is kept, and its scratch. */
static void lay_tile(const Lane *lane, Tile *tile, size j)
{
    lay_kept(lane, tile, lane->kept + j * (kept_elements(lane) / lane->tiles), 1);
    lay_scratch(lane, tile, lane->scratch);
}

/* Walks the tiles without reading, and keeps what their backward needs: state and anchor in place. */
void scan_again(const Lane *lane)
{
    unsigned before = flush_subnormals();
    Tile tile, next;
    lay_tile(lane, &tile, 0);
    for (size i = 0; i < lane->depth; i++)
        memcpy(tile.stacks[i], lane->stacks[i], sizeof(REAL) * lane->r * out(lane, i) * in(lane, i));
    for (size j = 0; j < lane->tiles; j++) {
        size last = j == lane->tiles - 1;
        Rows key = tile_rows(lane->key, j, lane->c), value = tile_rows(lane->value, j, lane->c);
        gates_forward(lane, &tile, j);
        anchor_forward(lane, &tile, open_chunk(lane, j, tile.stacks), key, value);
        if (!last) lay_tile(lane, &next, j + 1);
        if (!last || !lane->ends_walk)
            update_forward(lane, &tile, tile.stacks, last ? lane->stacks : next.stacks, key);
        if (!last) tile = next;
    }
    unflush(before);
}

/* ---- a tile, backward -------------------------------------------------------------------------------------------- */

/* U: linear in the gradient of [W; S] after the tile, which becomes that at its start. */
static void update_backward(const Lane *lane, Tile *tile, Rows key)
{
    size c = lane->c, r = lane->r;
    for (size i = 0; i < lane->depth; i++) {
        size width = out(lane, i), from = in(lane, i);
        REAL *dstack = lane->dstacks[i], *at = tile->dhidden;
        Rows x = input_of(lane, tile, key, i);
        product(lane, "NT", c, r * width, from, x.first, x.apart, dstack, from, 0, at);
        const Scalars *scalars = &tile->gated[i].scalars, *dscalars = &tile->dscalars[i];
        scale_backward(c, r, width, write_of(lane, tile, i), scalars->end, at, dscalars->end, tile->dwrites[i]);
        product(lane, "NN", c, from, r * width, at, r * width, dstack, from, 0, tile->dinputs[i]);
        carry_backward(r, width * from, scalars->carry, tile->stacks[i], dstack, dscalars->carry);
    }
}

/* dl/d(net reads before the LN) in drows, and the LN's own gradients. */
static void read_top_backward(const Lane *lane, Tile *tile, Rows dreads)
{
    size last = lane->depth - 1, width = out(lane, last);
    const REAL *weight = lane->norm_weight;
    REAL *dweight = tile->dnorm_weight, *dbias = tile->dnorm_bias;
    memset(dweight, 0, sizeof(REAL) * width), memset(dbias, 0, sizeof(REAL) * width);
    for (size t = 0; t < lane->c; t++) {
        const REAL *dread = dreads.first + t * dreads.apart;
        REAL *unit = tile->read_unit, *dz = tile->drows + t * width;
        memcpy(dz, dread, sizeof(REAL) * width);
        if (!weight) continue;
        REAL s = normalise(width, tile->answered[last] + t * width, unit);
        EACH for (size i = 0; i < width; i++) {
            dweight[i] += dread[i] * unit[i];
            dbias[i] += dread[i];
            dz[i] = dread[i] * weight[i];
        }
        pull(width, s, unit, dz, dz);
    }
}

/* R: from dl/d(net reads), added to what U left; leaves dl/dq without the residual in drows. */
static void read_backward(const Lane *lane, Tile *tile, Rows key, Rows query)
{
    size c = lane->c, r = lane->r;
    for (size i = lane->depth; i-- > 0;) {
        size width = out(lane, i), from = in(lane, i);
        REAL *dz = tile->drows, *gated = tile->parts[i], *mixed = tile->mixed[i], *dh = tile->dhidden;
        const Scalars *scalars = &tile->gated[i].scalars, *dscalars = &tile->dscalars[i];
        REAL *restrict across = tile->across, *restrict dwrite = dscalars->write;
        const REAL *v = write_of(lane, tile, i), *write = scalars->write, *scores = tile->scores[i];
        Rows x = input_of(lane, tile, key, i), h = i ? rows_of(tile->asked[i], from) : query;
        scale_backward(c, r, width, dz, scalars->read, gated, dscalars->read, 0);
        product(lane, "NT", c, c, width, dz, width, v, width, 0, across);
        product(lane, "TN", c, width, c, mixed, c, dz, width, 1, tile->dwrites[i]);
        EACH for (size k = 0; k < c * c; k++) mixed[k] = write[k] * across[k], dwrite[k] = across[k] * scores[k];
        product(lane, "NN", c, from, r * width, gated, r * width, tile->stacks[i], from, 0, dh);
        product(lane, "NN", c, from, c, mixed, c, x.first, x.apart, 1, dh);
        product(lane, "TN", r * width, from, c, gated, r * width, h.first, h.apart, 1, lane->dstacks[i]);
        product(lane, "TN", c, from, c, mixed, c, h.first, h.apart, 1, tile->dinputs[i]);
        if (i) gelu_backward(c * from, dh, tile->answered[i - 1], dz);
        else memcpy(dz, dh, sizeof(REAL) * c * from);
    }
}

/* A at the top: from dV of the last matrix back through the LN's pull, the objective and the LN: dZ in dtop. */
static void anchor_top_backward(const Lane *lane, Tile *tile)
{
    size last = lane->depth - 1, width = out(lane, last);
    const REAL *weight = lane->norm_weight;
    REAL *dweight = tile->dnorm_weight, *dbias = tile->dnorm_bias, *p = tile->read_unit;
    for (size t = 0; t < lane->c; t++) {
        const REAL *signal = tile->signal + t * width, *unit = tile->unit + t * width;
        REAL *dtop = tile->dwrites[last] + t * width, *dz = tile->dtop + t * width, *dtarget = tile->dtarget + t * width;
        REAL *dweighted = dtarget;
        EACH for (size i = 0; i < width; i++) dtop[i] = -dtop[i];
        if (!weight) {
            EACH for (size i = 0; i < width; i++) dz[i] = lane->dot ? 0 : dtop[i], dtarget[i] = -dtop[i];
            continue;
        }
        pull(width, tile->rstd[t], unit, dtop, dweighted);
        EACH for (size i = 0; i < width; i++) {
            REAL dsignal = dweighted[i] * weight[i], derror = lane->dot ? 0 : dsignal;
            dweight[i] += dweighted[i] * signal[i] + derror * unit[i];
            dbias[i] += derror;
            p[i] = signal[i] * weight[i];
            dz[i] = derror * weight[i];
            dtarget[i] = -dsignal;
        }
        pull_backward(width, tile->rstd[t], unit, p, dtop, tile->top + t * width, dz);
    }
}

/* A: the double backward, from dV and dX of every matrix to the tokens; adds the anchor's dW to danchor. */
static void anchor_backward(const Lane *lane, Tile *tile, REAL *const *anchor, REAL *const *danchor, Rows key)
{
    size last = lane->depth - 1, c = lane->c;
    for (size i = 0; i < last; i++) {
        size width = out(lane, i), above = out(lane, i + 1);
        const REAL *restrict dwrite = tile->dwrites[i], *restrict slope = tile->slopes[i];
        REAL *restrict dinto = tile->dinto[i];
        EACH for (size k = 0; k < c * width; k++) dinto[k] = dwrite[k] * slope[k];
        product(lane, "NT", c, above, width, dinto, width, anchor[i + 1], width, 1, tile->dwrites[i + 1]);
    }
    anchor_top_backward(lane, tile);
    const REAL *dz = tile->dtop;
    for (size i = last + 1; i-- > 0;) {
        size width = out(lane, i), from = in(lane, i);
        Rows x = input_of(lane, tile, key, i);
        product(lane, "TN", width, from, c, dz, width, x.first, x.apart, 1, danchor[i]);
        product(lane, "NN", c, from, width, dz, width, anchor[i], from, 1, tile->dinputs[i]);
        if (!i) break;
        product(lane, "TN", width, from, c, write_of(lane, tile, i), width, tile->dinto[i - 1], from, 1, danchor[i]);
        bend(c * from, tile->pre[i - 1], tile->into[i - 1], tile->slopes[i - 1], tile->dwrites[i - 1],
             tile->dinputs[i]);
        dz = tile->dinputs[i];
    }
}

/* The tile's token gradients, with the residual's share: y = net(q) + q, target = v - k. */
static void tokens_out(const Lane *lane, const Tile *tile, size j)
{
    size width = in(lane, 0), values = out(lane, lane->depth - 1), c = lane->c;
    Rows dkey = tile_rows(lane->dkey, j, c), dquery = tile_rows(lane->dquery, j, c);
    Rows dvalue = tile_rows(lane->dvalue, j, c), dreads = tile_rows(lane->dreads, j, c);
    for (size t = 0; t < c; t++) {
        const REAL *restrict dk = tile->dinputs[0] + t * width, *restrict dq = tile->drows + t * width;
        const REAL *restrict dtarget = tile->dtarget + t * values, *restrict dread = dreads.first + t * dreads.apart;
        REAL *restrict key = dkey.first + t * dkey.apart, *restrict query = dquery.first + t * dquery.apart;
        REAL *restrict value = dvalue.first + t * dvalue.apart;
        EACH for (size i = 0; i < width; i++) {
            key[i] = lane->folds && !lane->dot ? dk[i] - dtarget[i] : dk[i];
            query[i] = lane->folds ? dq[i] + dread[i] : dq[i];
        }
        EACH for (size i = 0; i < values; i++) value[i] = dtarget[i];
    }
}

/* The anchor's gradient, gathered over a chunk's tiles, joins W's where the chunk opens. */
static void join_anchor(const Lane *lane)
{
    for (size i = 0; i < lane->depth; i++) {
        size count = out(lane, i) * in(lane, i);
        EACH for (size k = 0; k < count; k++) lane->dstacks[i][k] += lane->danchor[i][k];
        memset(lane->danchor[i], 0, sizeof(REAL) * count);
    }
}

/* The tile's gradients of the LN join those of the tiles before. */
static void norm_out(const Lane *lane, const Tile *tile)
{
    for (size i = 0; lane->norm_weight && i < out(lane, lane->depth - 1); i++) {
        lane->dnorm_weight[i] += tile->dnorm_weight[i];
        lane->dnorm_bias[i] += tile->dnorm_bias[i];
    }
}

/* The weights that tile j's inner gradients were taken at. */
static void anchor_of(const Lane *lane, size j, REAL **anchor)
{
    Tile first;
    while (j > 0 && !lane->opens[j]) j--;
    lay_tile(lane, &first, j);
    for (size i = 0; i < lane->depth; i++) anchor[i] = lane->opens[j] ? first.stacks[i] : lane->anchor[i];
}

/* Takes the tiles in reverse, from what scan_again kept; anchor: the first W of the chunk that the run starts in. */
void scan_backward(const Lane *lane)
{
    unsigned before = flush_subnormals();
    REAL *anchor[DEEPEST];
    Tile tile;
    size c = lane->c;
    for (size j = lane->tiles; j-- > 0;) {
        Rows key = tile_rows(lane->key, j, c), query = tile_rows(lane->query, j, c);
        lay_tile(lane, &tile, j);
        anchor_of(lane, j, anchor);
        gates_forward(lane, &tile, j);
        for (size i = 0; i + 1 < lane->depth; i++)
            refresh(c * out(lane, i), tile.pre[i], tile.into[i], tile.inputs[i + 1], tile.writes[i], tile.slopes[i]);
        update_backward(lane, &tile, key);
        read_forward(lane, &tile, tile.stacks, key, query);
        read_top_backward(lane, &tile, tile_rows(lane->dreads, j, c));
        read_backward(lane, &tile, key, query);
        anchor_backward(lane, &tile, anchor, lane->opens[j] ? lane->dstacks : lane->danchor, key);
        tokens_out(lane, &tile, j);
        norm_out(lane, &tile);
        gates_backward(lane, &tile, j);
        if (lane->opens[j] && !lane->ends[j]) join_anchor(lane);
    }
    unflush(before);
}
