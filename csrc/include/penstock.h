/* Penstock's native kernels: the C ABI.
 *
 * A library like this exists once per instruction set; all have these entries. A caller packs weights into matrices,
 * describes a model as a flat list of operations over registers, and runs the list once per step with all threads of
 * a pool: between two steps nothing of a model is looked at again, and nothing is allocated inside one.
 *
 * Numbers: registers hold float32 rows; sums are float32 or exact int32. A row's result does not depend, bit for bit,
 * on the other rows of a step, on how a text is cut into steps, on pages or on the number of threads.
 *
 * Letters: T tokens of a step, B sequences, R selected rows (those whose logits are wanted), N outputs and K inputs of
 * a matrix, H query heads, G kv heads, D head dim.
 */
#ifndef PENSTOCK_H
#define PENSTOCK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define PST_API __attribute__((visibility("default")))
#else
#define PST_API
#endif

#define PST_ABI 20
#define PST_PANEL 64 /* outputs of a panel */

/* ---- the library --------------------------------------------------------------------------------------------- */

PST_API int32_t pst_abi(void);          /* PST_ABI of this library */
PST_API const char *pst_isa_name(void); /* "base", "avx2", "avx512", "avx512bf16" */
/* 0: this processor cannot run the library. Otherwise the larger, the better. Safe on every x86-64. */
PST_API int32_t pst_score(void);
/* Small cases of each operation against double precision, in a few milliseconds. 0, or 1 and a sentence that names what
 * is wrong in `message`. Only where pst_score() is not 0. */
PST_API int32_t pst_self_test(char *message, int32_t size);

/* ---- threads ------------------------------------------------------------------------------------------------- */

typedef struct pst_pool pst_pool;
/* `threads` in all, the caller of a run among them. A waiting thread spins `spin_us` at most, then sleeps.
 * `pin`: thread i runs on the i-th processor that this process may use. NULL if a thread cannot be started. */
PST_API pst_pool *pst_pool_new(int32_t threads, int32_t spin_us, int32_t pin);
PST_API void pst_pool_free(pst_pool *pool);
PST_API int32_t pst_pool_threads(const pst_pool *pool);
/* From now on `*progress` grows by one with every operation of a program that these threads finish, so that others can
 * tell a long step from a stuck one. NULL: nobody looks. It must outlive the pool, or the next call of this. */
PST_API void pst_pool_watch(pst_pool *pool, uint64_t *progress);

/* ---- numbers ------------------------------------------------------------------------------------------------- */

enum pst_dtype { PST_F32 = 0, PST_F16 = 1, PST_BF16 = 2, PST_I8 = 3 };

/* ---- matrices ------------------------------------------------------------------------------------------------
 * y = x W^T. W [N, K] is kept in panels of 64 outputs, the inputs of one panel one after the other:
 *
 *   PST_M_F32   [N/64][K][64] float
 *   PST_M_F16   [N/64][K][64] half
 *   PST_M_BF16  [N/64][K/2][64][2] bfloat16; K is padded to an even number with zeros
 *   PST_M_BLOCK codes with whatever scales and zeros they share, as files have them or as numbers were rounded to
 *
 * N is padded to a multiple of 64; outputs in the padding are never written.
 */
enum pst_format { PST_M_F32 = 0, PST_M_F16 = 1, PST_M_BF16 = 2, PST_M_BLOCK = 5 };

/* PST_M_BLOCK: W[n, k] = value of the code * scale of its group - zero of its group.
 *
 * What a code is. Uxx: unsigned integers of so many bits; the value is code - offset, or the code where there are zeros.
 * T4: an index into a table of 16 integers of -128 ... 127. F4: an index into a table of 16 floats. E4M3: the bits of a
 * float. The others: rows of ggml's blocks of 256, scales among them, as they lie in a file. */
enum pst_code {
    PST_C_U8 = 0, PST_C_U6, PST_C_U5, PST_C_U4, PST_C_U3, PST_C_U2, PST_C_T4, PST_C_F4, PST_C_E4M3, PST_C_IQ3_S,
    PST_C_IQ3_XXS, PST_C_IQ2_S, PST_C_IQ2_XS, PST_C_IQ2_XXS, PST_C_IQ1_S, PST_C_IQ1_M, PST_C_TQ1_0
};
/* How the scale of a group is kept. U8_F16, I8_F16: an integer per group times a half per 256 inputs. */
enum pst_scale { PST_S_F32 = 0, PST_S_F16, PST_S_BF16, PST_S_E4M3, PST_S_E8M0, PST_S_U8_F16, PST_S_I8_F16 };
/* What is subtracted. U8, F16_CODES, BF16_CODES: zero points in units of codes, so the scale multiplies them. F16: values.
 * U8_F16: values, an integer per group times a half per 256 inputs. */
enum pst_zero { PST_Z_NONE = 0, PST_Z_U8, PST_Z_F16_CODES, PST_Z_BF16_CODES, PST_Z_F16, PST_Z_U8_F16 };

/* What the rows x become before the product: float32; bfloat16; or 8 bits: each block of a row with one float scale,
 * max |x| / 127, values rounded to the nearest, ties to even. A block is 32 inputs, or the weights' group where that is 64
 * or 128. Possible pairs: F32, F16: A_F32. BF16: A_F32 or A_BF16. BLOCK: A_I8, or A_F32 and A_BF16 (weight-only); but codes
 * of floats, F4 and E4M3, not A_I8. F4 meets rows of A_BF16 as float32.
 *
 * A product with PST_M_BLOCK adds in this order, whatever the number of rows: `acc` is an output's float32, s an exact sum
 * of codes (their offsets taken out) times values of 8 bits, xs the scale of a block of the row, w and z scale and zero of
 * the weights' group as float32 (zero points times their scale), fma() one rounding (two, where instructions lack it):
 *
 *   one scale for all of a row   of each block acc = fma(s, xs, acc); last acc = acc * w, then fma(-z, sum of all, acc)
 *   groups of 32 and more        of each block acc = fma(s, xs * w, acc), then fma(-z, xs * sum of the block's values, acc)
 *   groups of 16                 of each block acc = fma(fma(s1, w1, s0 * w0), xs, acc), then both zeros as above
 *   weight-only                  of each group t, a chain of fma over its inputs in order (pairs of bfloat16: as vdpbf16ps
 *                                adds them), acc = fma(t, w, acc), then fma(-z, sum of the group's inputs, acc)
 *
 * Terms with z are left out where the format has no zeros. A row's block with a NaN or an infinity has the scale NaN, and
 * so are all outputs of that row. */
enum pst_act { PST_A_F32 = 0, PST_A_BF16 = 1, PST_A_I8 = 2 };

typedef struct pst_matrix {
    int32_t format; /* enum pst_format */
    int32_t act;    /* enum pst_act */
    int32_t rows;   /* N, without padding */
    int32_t cols;   /* K, without padding */
    int32_t group;  /* PST_M_BLOCK: inputs that share a scale, 16, 32, 64, 128 or 256, or 0: all of a row. Not looked at where
                       codes are rows of blocks. Else 0 */
    int32_t pair;   /* 1: every panel holds 32 outputs of a gate, then the same 32 of an `up`; rows counts both */
    int32_t code;   /* PST_M_BLOCK: enum pst_code; else 0, as the next four */
    int32_t scale;  /* enum pst_scale */
    int32_t zero;   /* enum pst_zero */
    int32_t offset; /* the code of zero, 0 ... 255; 0 where there are zeros, and of T4, F4, E4M3 and blocks */
    float factor;   /* what every scale is multiplied by */
    const void *data;   /* 64-byte aligned */
    const float *bias;  /* [padded N] in the order of the panels, or NULL */
    const float *table; /* [16] of T4 and F4; else NULL */
    const int32_t *order; /* NULL, or [K]: input i of the panels is component order[i] of a row */
} pst_matrix;

/* Bytes of `data` of one panel. -1 for arguments that no format has. Of `m` only what says the format is
 * looked at: format, cols, group, code, scale, zero. */
PST_API int64_t pst_panel_bytes(const pst_matrix *m);

/* Pack panels first ... last-1. `row_of[64 * p + j]` is the source of output j of panel p: the address of `cols`
 * numbers of `dtype` (PST_F32, PST_F16, PST_BF16), or NULL for padding. `data` is that of panel 0.
 * PST_M_BLOCK rounds to 8 bits (PST_C_U8, one PST_S_F32 per output, offset 128) or 4 (PST_C_U4, a PST_S_F16 per 32, 64 or
 * 128 inputs, offset 8).
 * Uses the calling thread alone; panels may be packed by several at once. 0, or -1 for what no format has. */
PST_API int32_t pst_pack(const pst_matrix *m, int32_t dtype, const void *const *row_of, int32_t first, int32_t last,
                         void *data);

/* Pack panels of PST_M_BLOCK from codes. Every array has a pointer per output, as `row_of` above (NULL: padding), to:
 *   codes        [cols] bytes, one code each (signed ones with the offset added); or the row's blocks
 *   scales       [ceil(cols / group)] of the scale's type; the integers of U8_F16 and I8_F16
 *   supers       [ceil(cols / 256)] halves of U8_F16 and I8_F16
 *   zeros, super_zeros    the same of zeros
 * Arrays of what the format has not are NULL. Inputs are in the panels' order already. A code of E4M3 that is NaN makes the
 * scale of its group NaN. 0, or -1 for what no format has, and for codes with more bits than it has. */
PST_API int32_t pst_pack_codes(const pst_matrix *m, const void *const *codes, const void *const *scales,
                               const void *const *supers, const void *const *zeros, const void *const *super_zeros,
                               int32_t first, int32_t last, void *data);

/* The values that panel `panel` of `m` stands for, as float [64][cols] in the panels' order of inputs: exact, but for the
 * roundings to float32 of scale * factor, code * scale and what is subtracted, in this order. */
PST_API int32_t pst_unpack(const pst_matrix *m, int32_t panel, float *out);

/* ---- registers ----------------------------------------------------------------------------------------------- */

enum { PST_ROWS_TOKENS = 0, PST_ROWS_SELECTED = 1 };

typedef struct pst_register {
    float *data;    /* first number of row 0; rows may be parts of longer ones */
    int64_t stride; /* floats from one row to the next */
    int32_t width;  /* numbers in a row */
    int32_t rows;   /* how many a step fills: PST_ROWS_TOKENS or PST_ROWS_SELECTED */
} pst_register;

/* ---- operations ----------------------------------------------------------------------------------------------
 * `in` and `out` are register numbers (-1: none), `n`, `f` and `p` what is fixed. Outputs may be inputs where "in
 * place" is said; otherwise they must not overlap. "?" marks what may be absent (-1, NULL).
 *
 * PST_EMBED      out[t] = table[id of t] * f0            p0 table [V, E]; n0 dtype; n1: 0 ids are token_ids, 1 positions.
 *                Or p1 pst_matrix in place of p0 and n0: its rows, exact, of any format without a pair and an order.
 *                n2 V: ids from there on read row 0; 0: there are none. n3 words: ids are type * n3 + word, and n4 says
 *                which is looked up, 0 the word, 1 the type; n3 0: ids are what they are
 * PST_SELECT     out[r] = in0[rows[r]]
 * PST_NORM       every stretch of n0 numbers of a row by itself: in place
 *                n1: 1 rms, x / sqrt(mean(x^2) + f0) * w; 2 layer, (x - mean) / sqrt(var + f0) * w + b
 *                p0? w, p1? b; n2: 0 one w [n0] for all stretches, 1 w [width]
 * PST_LINEAR     y = norm?(in0) W^T + bias;  p0 pst_matrix [n3 segments; 0 is 1]: outputs of one after those of another,
 *                each in panels, a format and groups of its own; a `pair` is the only one. Norm before it: n0 kind as
 *                in PST_NORM (0: none), p1? w, p2? b, f0 eps. Then n1: 0 y; 1 act(y); 2 act(gate) * up for a `pair`, out is half as wide;
 *                3 the y of a `pair`, panel by panel as they lie: 32 of the gate, then the same 32 of the up, the last ones filled up.
 *                n2 activation, f2 limit (of those that are clamped). Last: out = in1? + f1 * y (f1 is 1 for plain y).
 *                out may be in1.
 * PST_ROPE       in place on n0 heads of n1 numbers: components n2 ... n2 + 2 * n3 turn by table p0
 *                float [2, n5, n3] (cosines, sines) at the token's position; n4: 1 interleaved pairs
 * PST_WRITE      in0 [T, n2 heads, n3], in1? [T, n4, n5] into planes n6, n7 of group n0, its layer n1, at the tokens'
 *                slots: see pst_step.mask. Unless n8 and n9 are 0, the least and the largest that the pages now hold of
 *                in0, component by component, into planes n8 and n9: see pst_pages. n10 > 1: of the tokens only those in slots
 *                s with s % n10 == n11, which are in slots s / n10 of the pages here; n10 -1: those in blocks that are here
 *                (pst_group.held); without n8 and n9
 * PST_ATTEND     out [T or R, H * n5] = softmax attention of in0 [T, H, D] (of its selected rows, if out has those; or in0
 *                has them only) over
 *                layer n1 of group n0; n2 H, n3 G, n4 D,
 *                n5 width of a value, n6 plane of keys, n7 plane of values, n8 window (0 none), n9 chunk (0 none),
 *                n11 numbers of a key that come last and lie in plane n10 (0: all lie in n6; else n7 is n6);
 *                f0 scale, f1 soft cap (0 none); p0? slopes float [H], p1? sinks float [H].
 *                A token at position p sees keys 0 ... p, or the last n8 of them, or from p / n9 * n9 on; in a tree
 *                (pst_step.mask) those of its path. p2? pst_rotation: the plane holds raw keys. p3? pst_pages: it sees
 *                the likeliest pages only. in1? routes of PST_CHOOSE: a token that sees more than in1 is wide reads the
 *                tokens in those slots, as if there were no others; then without window, chunk, slopes, p2 and p3. in2?
 *                what PST_REHEARSE found, p3 its pst_pages: the same for tokens that it chose for
 * PST_CHOOSE     out [T, K] = the slots of the K tokens whose scores are best of those that a token sees, ascending, for
 *                tokens that see more than K (the others' rows are left as they are); of equal scores the lowest slots,
 *                a NaN last. A token is worth the sum over the heads, in order, of in1 [T, n2] * max(0, f0 q.k) of in0 q
 *                [T, n2, n3] and keys k [n3] of layer n1 of group n0, in plane n4. No sequence has more than n5 tokens
 * PST_REHEARSE   out [T, n3 * W] = bits of the slots, 32 to a number and W = max_tokens / 32, rounded up, numbers for each
 *                kv head, that tokens read, of in0 rehearsed queries [T, n2 H, n4] and parts of keys [n3 G, n4] of layer n1
 *                of group n0, in plane n5: see pst_pages. n6 0: of the first token of each sequence in the step, 1: of its
 *                others, whose keys PST_WRITE must have kept. f0 scale of q.k, f1 reach; p3 pst_pages; p0? int64 [2]: added
 *                are the tokens read, head by head, and those there were, of tokens that chose
 * PST_ATTEND_TEXT  out [T, H, D] = softmax attention of in0 q over in1 k and in2 v, all [T, n0 H, D], of the whole text: what
 *                a sequence has in the step, which begins at position 0 (others are NaN). n1: a token sees those less than
 *                n1 places away; 0: all. f0 scale. out must not overlap its inputs
 * PST_ADD, PST_MUL         out = in0 + in1 (f0 not 0: in0 + f0 in1, rounded once), in0 * in1: in place on either
 * PST_SCALE, PST_CLIP, PST_SOFT_CAP   x * f0, or x * p0? [width];  x cut to -f0 ... f0;  f0 * tanh(x / f0): in place
 * PST_ACT        n0 activation of in0: in place; f0 and f1 are those of xielu
 * PST_GATED      act(in0) * in1, n0 activation, f0 limit: in place on in0 or in1. n1 1: of what PST_LINEAR gives of a pair,
 *                in0; not in place
 * PST_ADAPT      in1 = in1 gain? + shift? + factor (in0 A^T) B^T [T or R, n0], of the adapter of each row's token; rows without one
 *                stay as they are: in place on in1. p0 pst_token_adapters, p1 pst_adapter [..] of this product, both may change between
 *                two runs; n2 their largest rank. n1 1, 2: the gate, the up of what PST_LINEAR gives of a pair
 * PST_ADAPT_CODES  the same of adapters with codes: in1 = in0 W^T + bias, W being the codes of p2? pst_matrix (one scale per group,
 *                F32, F16 or BF16; of a pair both halves) with the adapter's scales; or in1 + in0 D^T. p0, n0, n1 as in PST_ADAPT,
 *                p1 pst_adapter_codes [..]
 * PST_GATHER     out [T or R, sum of widths] = in0 of every rank, rank by rank, p1 int32 [size] widths: see pst_exchange, p0.
 *                A rank of width 0 has no in0
 * PST_SEND       in0 [T or R, N] to whoever has the other end of p0 pst_stage_channel; PST_RECEIVE  out [T or R, N] from there: as
 *                many rows, of the same width, in the same order
 * PST_ATTEND_PART  out [T or R, H * (n5 + 2)] = as PST_ATTEND, of the tokens at positions p with p % p1[0] == p1[1] alone, p1 int32
 *                [2], which are all that pages hold, or, p1[0] being -1, of those in blocks that are here (pst_group.held; then
 *                without p0): of each head the sum of weighted values [n5], the largest score and the sum
 *                of weights against it; 0, -inf and 0 where a token sees none of them. Without p2, p3, in1, in2, and trees
 * PST_MERGE      out [T or R, n0 / size * n1] = what PST_ATTEND_PART gave of all ranks, in0 [T or R, n0 * (n1 + 2)], as attention over
 *                all tokens of this rank's heads, the rank-th n0 / size of them: see pst_exchange, p0. p1? sinks float [n0 / size].
 *                n2 0: every rank gives to every other, and they are added in order of ranks; 1: pairwise, log2(size) times,
 *                for a power of two. in0 holds anything then
 * PST_GATE_ROWS  in0 * sigmoid(in1), n0 = 1: in0 * softplus(in1); in1 of width 1 or as in0: in place on in0
 * PST_BIASED_HEADS  every head of n0 of in0, and behind it four numbers: f0 e^(p0[head] softplus(in1[head])), f0 without p0,
 *                and zeros
 * PST_SCALE_QUERIES  in0 * (1 + f0 * log(1 + floor((position + f2) / f1))): in place
 * PST_ARGMAX     of rows of in0: p0 int32 [R] the first largest, p1 float [R] its value, p2 uint8 [R] 1 if all of the
 *                row is finite
 * PST_ROUTE      out [T, 2 * n0] = the n0 experts of each token, ids ascending, and what each weighs, of in0 [T, X] logits of
 *                a router. Scores: n1 0 their softmax, 1 their sigmoid, 3 the root of their softplus. p2? int32 [V, n0]: the
 *                experts of each token id, ascending, and nobody chooses. Else the best n0 are chosen, equals in order of their
 *                ids, a NaN last, by scores + p0? [X]; of n2 equal groups only the best n3 take part, a group being worth
 *                its best (n4 0) or its two best together (n4 1). They weigh their scores (n6 1: the softmax of the chosen
 *                logits); n5 1: divided by their sum (+ 1e-20 unless it is a softmax); then times f0, and p1? [X].
 *                n1 2: SparseMixer (penstock.core.router.Router), f1 twice its jitter; only n0, f0 and p1 matter then
 *                n1 4: those listed weigh 1 (n5 1: 1 / n0), and in0 is not looked at. n7 1: p2 is [1, n0], the same for all
 * PST_EXPERTS    out = in2? + the sum over a token's experts, in order of ids, of weight * down(act(gate) * up) of in0, in1
 *                being routes of n1 experts. Of n0 experts: p0 pst_matrix [n0], gate and up as a `pair`; or up, and
 *                act(up) is all; or gate, and p1? pst_matrix [n0] up. p2 pst_matrix [n0] down. n2 1: the weight multiplies
 *                in0, not the result. n3 activation, f0 limit. Experts that nobody chose are not read. out may be in2.
 *                p3? pst_shared_experts: ranks share them out
 * PST_LATENT     heads of a row, each times a matrix of its own: out [T, n0 heads, n1 + n3] = the first K numbers of a
 *                head of in0 [T, n0, K + n3] times its W [n1, K], then the n3 that follow as they are. p0 pst_matrix: the
 *                panels of each head after those of the one before; each begins with a panel, and the outputs that fill
 *                its last one up count among `rows`. No bias, pair or order. `out` must not overlap in0
 *
 * Residual streams (penstock.core.mixers.streams.Streams); n0 of them, at most 8 where they have weights:
 * PST_SPREAD            out = in0 n0 times, one after the other
 * PST_WEIGH_STREAMS     of in0 [T or R, (2 + n0) n0], or [.., n0] and then only the first: sigmoid(p0[0] x + p1) + f0 of
 *                       the first n0; 2 sigmoid(p0[1] x + p1) of the next; of a matrix [n0, n0] softmax(p0[2] x + p1) of
 *                       its rows + f0, then n1 times divided by the sums of its columns + f0, by those of its rows + f0
 *                       between two times: in place. p0 float [3] or [1], p1 float, as wide as in0
 * PST_COLLAPSE_STREAMS  out [.., E] = the sum of the streams in0 [.., n0 E] by the first n0 numbers of in1
 * PST_MIX_STREAMS       stream k of in0 = in1[n0 + k] in2 + sum over j of in1[2 n0 + j n0 + k] stream j: in place on in0
 *
 * Entries that several tokens share (penstock.core.mixers.compressed.EntryAttention), rows of a page's own: entry w is made
 * of tokens w m ... w m + m - 1 and lies in the page of the last of them, row w - block * S / m. A token at position p sees
 * (p + 1) / m of them. A step with nodes of a tree is refused.
 * PST_WRITE_ENTRIES     the entries that end in this step, of what PST_WRITE has put into planes n2 (values) and n3 (scores),
 *                       float32 [s D], of layer n1 of group n0, to plane n6 of layer n5 of group n4; n7 m; n8 1: s is 2, the
 *                       second half of a token's numbers goes to its own entry, the first to the next one. n9 positions of
 *                       the table, n10 1 interleaved pairs, n11 half of the last numbers, which turn as at the position of
 *                       the first token. p0 float [m, s D] added to scores, p1 float [D] weights of an rms norm, f0 its eps,
 *                       p2 float [2, n9, n11]
 * PST_CHOOSE_ENTRIES    out [T, k] = the k entries, ascending, with the largest sums over n4 heads of in1 [T, n4] times
 *                       max(0, f0 q.entry), of in0 q [T, n4, n5], equals in order; -1 behind those there are. n0 group, n1
 *                       layer, n2 plane; n3 m; n6 entries at most
 * PST_ATTEND_ENTRIES    out [T, n8 heads, n9] = softmax attention of in0 to the last n7 tokens in plane n2 of layer n1 of
 *                       group n0 and to the entries in plane n5 of layer n4 of group n3, those that in1? names or all, which
 *                       are keys and values; n6 m, f0 scale, p0 float [n8] sinks
 *
 * The following keep a state per sequence: float32, in the page of layer n1 of group n0, plane n2 and what is said. One
 * that begins (position 0) starts from zeros, whatever its page holds. Tokens go by one after the other. A step with
 * nodes of a tree is refused: a state follows one path. "in place" means on the input named.
 *
 * PST_CONV       out[t] = p1? + sum over k < n3 of p0[k] * in0 of n3 - 1 - k tokens ago, then silu if n4; p0 taps float
 *                [n3, width], p1? [width]; plane [n3 - 1, width], the last inputs
 * PST_SHIFT      out[t] = in0 of the token before; plane [width]
 * PST_LERP       in0 + (in1 - in0) * w, w p0? [width] or in2: in place. It keeps nothing
 * PST_SCAN       Mamba's: x in0, dt in1 [T, I], b in2, c in3 [T, N]; p0 a [I, N], p1 d [I]; plane [N, I]: with
 *                dt' = softplus(dt), S = S e^(dt' a) + dt' x b; out = c S + d x: in place on in0
 * PST_RG_LRU     x in0, gates of the input in1 and of the state in2 [T, I]; p0 a, p1, p2 biases of the gates, all [I]; plane
 *                [I]: with f = e^(a sigmoid(in2 + p2)), S = f S + x sigmoid(in1 + p1) sqrt(1 - f^2), where the root is left
 *                out at position 0; out = S: in place on in0
 * PST_DIAGONAL   x in0 [T, I]; complex p0 a, p1 c, both [2, I, n4], real parts first; p2 d [I]; planes n2, n3 [n4, I], real
 *                and imaginary parts of S: S = a S + x; out = real part of (sum over n4 of c S) + d x: in place on in0.
 *                n5 1: in0 and out [T, 2 I] are complex, real parts first; out = sum of c S, and p2 is not looked at
 * PST_MLSTM_GATES  gates of the input in0, of the state in1 [T, n4], q in2, k in3 [T, n4, n5]; f0 eps; planes n2 [n4, n5] N,
 *                n3 [n4, 1] m: with l = log(sigmoid(in1)), m' = max(l + m, in0), by = e^(l + m - m'), N = by N + e^(in0 - m') k:
 *                out [T, 3 n4] = by of every head, then e^(in0 - m') of every head, then of every head
 *                K^-0.5 / (max(|q K^-0.5 N|, e^-m') + f0)
 * The others have a matrix S [K, W] per head: n3 heads, n4 keys K, n5 width W; plane [n3, K, W]. In place on the input
 * [T, n3, W].
 * PST_SCAN2      Mamba-2's: x in0 [T, n3, W], dt in1 [T, n3], b in2, c in3 [T, n6, K], n6 groups of heads; p0 a, p1 d,
 *                p2 bias of dt, all [n3]; dt' = softplus(dt + p2) cut to f0 ... f1; S = S e^(dt' a) + b (dt' x);
 *                out = c S + d x
 * PST_RECURRENT  q in0, k in1 [T, n3, K], v in2 [T, n3, W], decay in3 [T, n3]: S = S sigmoid(decay) + k v; out = q S.
 *                Or p0 [n3] in place of in3: S = S p0 + k v
 * PST_WKV4       RWKV-4's mean of values v in1 [T, width] by keys in0: p0 decay, p1 bonus of the newest, both [width];
 *                planes n2, n3, n4 [width]: numerator, denominator, exponent: in place on in1
 * PST_WKV6       RWKV-5's and -6's: r in0, k in1 [T, n3, K], v in2 [T, n3, W], w in3 [T, n3, K], p0 bonus [n3, K]:
 *                out = r (S + (p0 k) v); S = e^(-e^w) S + k v. Or p1 [n3, K] in place of in3: S = p1 S + k v
 *                Without p0: k, v [T, n6, K or W], n3/n6 heads in a row share one; S = e^(-e^w) S + k (1 - e^(-e^w)) v;
 *                out = f0 r S
 * PST_WKV7       r in0, w in1, k in2 [T, n3, K], v in3 [T, n3, W], removal in4, rate in5 [T, n3, K]:
 *                S = e^(-e^-0.5 sigmoid(w)) S - (removal rate) (removal S) + k v; out = r S
 * PST_DELTA      q in0, k in1 [T, n6, K], n6 heads of keys, v in2 [T, n3, W], dt in3 [T, n3] or [T, n3, K], beta in4
 *                [T, n3]; n3/n6 heads in a row share a key, or, if n7, every n6-th does; p0 a [n3], f0 eps, f1 factor; q and
 *                k become unit vectors, x / sqrt(sum of x^2 + f0), and q is multiplied by K^-0.5;
 *                S = e^(a softplus(dt)) S, with f2 < 0 e^(f2 sigmoid(a dt)) S; S += k (f1 sigmoid(beta) (v - k S)); out = q S
 * PST_MLSTM      q in0, k in1 [T, n3, K], v in2 [T, n3, W], in3 [T, 3 n3] of PST_MLSTM_GATES: S = by S + k (e v);
 *                out = (q S) times the third
 * RWKV-7's rows, which keep nothing; n0 heads:
 * PST_REMOVAL_KEY      in0 * p0 [width], every head divided by its length, 1e-12 at least
 * PST_REPLACEMENT_KEY  in0 * (1 + (in1 - 1) * p0 [width]): in place
 * PST_VALUE_BONUS      (sum over a head of in0 * in1 * p0 [width]) * in2: in place
 * Rows of Gemma 3n:
 * PST_CUT_OFF    max(in0 - (its mean + f0 * its standard deviation), 0), row by row: in place
 * PST_STREAMS    n0 streams x_i side by side in in0, at most 8. n1 0: x_i + sum over j of in1_(n0 i + j) x_j, in1 of width
 *                n0 * n0. n1 1: x_i + (in1 - x_n2) (1 + in2_i), in1 as wide as a stream, in2 of width n0: in place on in0
 * PST_MATCH      in0 * sqrt(mean(in1^2) / max(mean(in0^2), f0)), row by row: in place on in0
 */
enum pst_kind {
    PST_EMBED = 1, PST_SELECT, PST_NORM, PST_LINEAR, PST_ROPE, PST_WRITE, PST_ATTEND, PST_ADD, PST_MUL, PST_SCALE,
    PST_CLIP, PST_SOFT_CAP, PST_ACT, PST_GATED, PST_GATE_ROWS, PST_SCALE_QUERIES, PST_ARGMAX,
    PST_ROUTE, PST_EXPERTS, PST_LATENT, PST_CONV, PST_SHIFT, PST_LERP, PST_SCAN, PST_SCAN2, PST_RECURRENT, PST_WKV4, PST_WKV7,
    PST_DELTA, PST_REMOVAL_KEY, PST_REPLACEMENT_KEY, PST_VALUE_BONUS, PST_CHOOSE = 33, PST_REHEARSE,
    PST_RG_LRU = 40, PST_MLSTM_GATES, PST_MLSTM, PST_DIAGONAL, PST_CUT_OFF = 45, PST_STREAMS, PST_MATCH,
    PST_SPREAD = 48, PST_WEIGH_STREAMS, PST_COLLAPSE_STREAMS, PST_MIX_STREAMS,
    PST_WRITE_ENTRIES, PST_CHOOSE_ENTRIES, PST_ATTEND_ENTRIES, PST_BIASED_HEADS = 55, PST_WKV6, PST_ADAPT_CODES, PST_GATHER, PST_ADAPT = 60,
    PST_ATTEND_TEXT, PST_SEND, PST_RECEIVE, PST_MERGE, PST_ATTEND_PART
};

enum pst_norm { PST_NORM_NONE = 0, PST_NORM_RMS, PST_NORM_LAYER };

/* silu x / (1 + e^-x); gelu with erf; gelu_tanh; relu; relu2 max(x, 0)^2; sigmoid; tanh; swiglu_clamped and silu_clamped
 * (gated only): as penstock.core.model_spec.FeedForward says; xielu (PST_ACT only): f0 x^2 + x / 2 above 0, else
 * f1 (e^min(x, -1e-6) - 1 - x) + x / 2. The limit of a gate, if there is one, cuts act(gate) to f0 at most, and up to
 * -f0 ... f0; of the clamped ones the gate before its activation. */
enum pst_activation {
    PST_SILU = 0, PST_GELU, PST_GELU_TANH, PST_RELU, PST_RELU2, PST_SIGMOID, PST_TANH, PST_SWIGLU_CLAMPED, PST_QUICK_GELU,
    PST_XIELU, PST_SILU_CLAMPED
};

/* PST_ATTEND of raw keys, kept as they were before their rotation: they turn when they are read, as PST_ROPE turns them,
 * at the position at which they are read, so a page may stand at several. A raw plane of float32 gives the bits of a
 * rotated one. Others are widened (and scaled) first: their bits differ from those of keys that were rotated and then
 * rounded, and queries are not rounded to bfloat16 for them. Values are as always. */
typedef struct pst_rotation {
    const float *table; /* [2, positions, half]: cosines, sines */
    int32_t positions, first, half, interleaved; /* as n5, n2, n3, n4 of PST_ROPE */
} pst_rotation;

/* PST_ATTEND of chosen pages: a token from pst_step.choose_from on (without it: one that is the only one of its sequence in
 * the step), which is no node of a tree, sees `tokens` tokens' worth of pages of each kv head (0: of the `share` of those
 * that it could see), the pages of the `recent` last tokens and of the others those with the largest sum over the components of max(q low, q high) of any of the kv head's
 * queries, equals in order. What it sees it sees as if there were no more: without window, chunk, slopes or rotation.
 * `low` and `high` are the planes that PST_WRITE keeps, one offset per page, of the type of the keys (of float32 beside
 * PST_I8). Sequences with more than `max_tokens` pages are read whole.
 *
 * Of PST_REHEARSE: the same tokens choose tokens, if they see more than the budget: the `recent` last ones, itself among
 * them, and as many as lie within the reach of a query's largest score, in the mean of the kv heads, at most the budget:
 * those with the largest sums over the kv head's queries of their weights, equals in order. */
typedef struct pst_pages {
    double share;
    int32_t low, high, tokens, recent, max_tokens;
} pst_pages;

/* PST_ADAPT: which adapter each token of the step has. */
typedef struct pst_token_adapters {
    const int32_t *of_token; /* [T] numbers of adapters, -1: none. NULL: no token has one */
    const int32_t *order;    /* [count] the tokens that have one, those of one adapter behind each other */
    int32_t count;
} pst_token_adapters;

#define PST_UNIT_BYTES 1024 /* of the numbers of adapters: what lies together in memory */

/* What one adapter does to one product with K inputs and N outputs, in units that lie anywhere. E: numbers of `dtype` in a
 * unit. All zero: nothing. */
typedef struct pst_adapter {
    const void *const *units; /* of A [rank / 4][ceil(K / (E / 4))], each [4 ranks][E / 4 inputs]; then of
                                 B [ceil(N / 64)][ceil(rank / (E / 64))], each [E / 64 ranks][64 outputs]; then, if there are any,
                                 of the gain and of the shift [ceil(N / 256)], each 256 floats. Zeros behind the last of all */
    int32_t dtype;            /* PST_F32, PST_F16 or PST_BF16 */
    int32_t rank;             /* a multiple of 4 */
    int32_t gain, shift;      /* 1: there is one */
    float factor;
} pst_adapter;

/* The same of codes; one of the two at most. */
typedef struct pst_adapter_codes {
    const void *scales;      /* in place of the model's, of their type: [panels][groups][64] in the order of its panels; of a half
                                of a pair [panels][groups][32] */
    const pst_matrix *delta; /* [N, K] that is added: PST_M_BLOCK of U8, U4 or U2 with F16 or F32 scales of 32, 64, 128 or all inputs,
                                rows A_F32, no pair, no order, no bias */
} pst_adapter_codes;

/* ---- ranks ------------------------------------------------------------------------------------------------------ */

#define PST_MAX_RANKS 64
#define PST_LINES_BYTES 4096

/* What a rank says of itself in memory that all share. */
typedef struct pst_rank_line {
    uint32_t arrived, sleepers; /* exchanges that it has given its part of; threads that wait for more */
    uint64_t gathers, bytes;    /* since the memory was made: exchanges, and bytes that it has given, once for each who got them */
    uint64_t filled[2];         /* bytes in each of its slots */
    uint64_t waited, merged;    /* nanoseconds that its first thread has waited for the others; parts of others that it merged */
    uint64_t unused;
} pst_rank_line;

/* Memory of one group of ranks, zero at first: PST_LINES_BYTES with a pst_rank_line each, then two slots of each rank. Every
 * rank does the same exchanges, in the same order. Who waits spins for spin_us, and then sleeps. */
typedef struct pst_exchange {
    void *memory;
    int32_t rank, size;
    int64_t slot_bytes;
    int32_t spin_us, unused;
} pst_exchange;

/* PST_EXPERTS on ranks, one of both. `widths` [size]: of every expert each rank makes so many of the numbers between the
 * products, rank by rank; gate and up have these rows then, down has the rows of the outputs that the rank makes, and takes
 * all numbers. `experts` [size + 1]: rank r has experts experts[r] ... experts[r + 1] - 1 whole, its matrices are theirs
 * alone, and n0 counts all; the rows of a step are shared out over ranks, each combines its own, and gives them to all.
 * No bit is another than on one rank. */
typedef struct pst_shared_experts {
    const pst_exchange *exchange;
    const int32_t *widths;
    const int32_t *experts;
} pst_shared_experts;

#define PST_CHANNEL_BYTES 128

/* What one end of a channel says of itself. */
typedef struct pst_stage_channel_end {
    uint32_t turn, sleepers;        /* pieces that it has given, or taken; threads that wait for more */
    uint64_t pieces, bytes, waited; /* the same since the memory was made; nanoseconds its first thread has waited for the other end */
    uint64_t unused[4];
} pst_stage_channel_end;

/* Memory of two neighbouring stages, zero at first: PST_CHANNEL_BYTES with the end that sends and the one that receives, then
 * `slots` slots, a power of two of them, each of which holds some rows at a time. */
typedef struct pst_stage_channel {
    void *memory;
    int32_t slots, spin_us;
    int64_t slot_bytes;
} pst_stage_channel;

/* Nanoseconds of `turns` gathers of so many bytes of each rank, all of whom must call it; -1 if a slot is too small. */
PST_API int64_t pst_exchange_time(const pst_exchange *exchange, int64_t bytes, int32_t turns);

#define PST_RELAY_VERSION 1
#define PST_RELAY_HEAD 16 /* bytes of a frame before those of a slot */

/* How a relay has ended. */
enum pst_relay_end {
    PST_END_STOPPED = 0, PST_END_CLOSED = 1, PST_END_LOST = 2, PST_END_STRANGE = 3, PST_END_VERSION = 4, PST_END_RANK = 5,
    PST_END_TURN = 6, PST_END_LENGTH = 7
};

/* A connection (stream socket, blocking) to ranks whose memory is another host's. Of each gather, the slot of every rank in
 * `gives` (bit r: rank r) goes there as a frame, in order of turns and ranks, and frames with those of `takes` come. A frame:
 * magic "PSTG", uint16 version, uint16 rank, uint32 turn, uint32 bytes, then these; all little-endian. */
typedef struct pst_relay {
    const pst_exchange *exchange; /* its rank means nothing here */
    uint64_t gives, takes;
    int32_t fd, stop;
    uint64_t given_frames, given_bytes, taken_frames, taken_bytes; /* bytes with their heads, counted before others see them */
    uint32_t error;                                               /* errno behind PST_END_LOST */
    uint32_t unused;
} pst_relay;

/* Each runs in a thread of its own until it is stopped, or the connection ends or says what it must not: a pst_relay_end. */
PST_API int32_t pst_relay_give(pst_relay *relay);
PST_API int32_t pst_relay_take(pst_relay *relay);
PST_API void pst_relay_stop(pst_relay *relay); /* both; whoever calls it shuts the socket down first */

typedef struct pst_op {
    int32_t kind;
    int32_t in[6];
    int32_t out;
    int32_t n[12];
    float f[4];
    const void *p[4];
} pst_op;

/* ---- programs ------------------------------------------------------------------------------------------------ */

/* Where a step's sequences keep one cache group: see penstock.ops.plan.GroupPlan.
 *
 * A line is what has pages of its own: layer i is line i. Or each kv head of a layer is one, if the group's planes have
 * one head while the operations that use them have G: then head j of layer i is line i * G + j. */
typedef struct pst_group {
    int32_t num_lines;
    int32_t block_size;
    const int32_t *const *tables; /* [B] -> the ids of the blocks of line 0; of line i i * strides[b] further */
    const int32_t *shared;        /* [B] 1: ids are slabs, the page of line i is id * num_lines + i; else pages */
    const int32_t *strides;       /* [B] */
    /* NULL, or [B] -> NULL, or [num_lines]: how many tokens before this step a line has forgotten, 0 ... start (the
     * position of the sequence's first token in this step). Its memory is by slots then: the token at position p is in
     * slot p - dropped, and sees what a token at that position sees of slots (PST_ATTEND: window, chunk, slopes and raw
     * keys go by slots). Not with nodes of a tree. */
    const int32_t *const *dropped;
    /* NULL, or [B] -> [M + 1], M being the blocks that a sequence has: how many of the first b blocks are on this rank, where
     * ranks have whole blocks (PST_WRITE, PST_ATTEND_PART). `tables` then names those that are here, in order. */
    const int32_t *const *held;
} pst_group;

/* Where the numbers of a plane are: element (page, offset, head, i) lies at
 * page * page_stride + offset * token_stride + head * head_stride + i, in numbers of `dtype`.
 *
 * PST_I8: a head of a token is D numbers -127 ... 127 and one float scale s; it stands for s times them. PST_WRITE takes
 * s = max |x| / 127 and rounds x / s to the nearest, ties to even; s is 0 if all x are 0, and NaN if one of them is not
 * finite. The scales are element 0 of a PST_F32 plane of the same group, pages and heads, with dim 1. */
typedef struct pst_plane {
    void *data;
    int32_t dtype;
    int32_t heads;
    int32_t dim;
    int32_t scales; /* PST_I8: the number in its group of the plane of scales; else not looked at */
    int64_t page_stride, token_stride, head_stride;
} pst_plane;

typedef struct pst_step {
    int32_t num_tokens, num_seqs, num_rows, num_groups;
    const int32_t *token_ids;       /* [T] */
    const int32_t *positions;       /* [T] */
    const int32_t *query_start_loc; /* [B+1] */
    const int32_t *rows;            /* [R] tokens of the step; fastest if neighbours follow each other */
    const pst_group *groups;        /* [num_groups] */
    /* NULL, or [T]: trees of guesses.
     *
     * mask[t] = 0: an ordinary token, which sees the tokens of its sequence before it and itself. Else t is a node of a
     * tree: its sequence has at most 64 tokens in this step, and t sees those of them whose bit is set (bit i: the i-th
     * from query_start_loc[b] on), and all that was cached before. The highest bit set is t's own. What t sees is its path
     * from the root: the j-th of them stands at position start + j, t itself last, where start is the position of the
     * sequence's first token in this step and so the number of tokens cached before. An ordinary token among nodes sees
     * all before it, which must be such a path.
     *
     * Nodes may have equal positions. PST_WRITE keeps the i-th token of a sequence in slot start + i, for ordinary tokens
     * their position; tables have blocks for all slots. All else (rotation, slopes, windows, chunks, learned positions,
     * scales of queries) goes by positions[t]. A node's output has the bits it has when its path is all that runs. */
    const uint64_t *mask;
    /* NULL, or [B]: the position from which on a sequence's tokens choose their pages: see pst_pages. */
    const int32_t *choose_from;
} pst_step;

typedef struct pst_program pst_program;
/* `planes[planes_of[g] ...]` are the planes of group g, planes_of has num_groups + 1 entries. Everything pointed to
 * by ops, registers and planes must outlive the program. NULL, and a sentence in `error`, if something does not fit. */
PST_API pst_program *pst_program_new(const pst_op *ops, int32_t num_ops, const pst_register *registers,
                                     int32_t num_registers, const pst_plane *planes, const int32_t *planes_of,
                                     int32_t num_groups, int32_t max_tokens, int32_t max_rows, int32_t threads,
                                     char *error, int32_t error_size);
PST_API void pst_program_free(pst_program *program);
/* Run operations first ... last-1. 0, or -1 if the step is larger than the program was made for, its mask names tokens or
 * positions that pst_step.mask rules out (any, where operations keep states), or its lines have forgotten what pst_group.dropped rules out. */
PST_API int32_t pst_program_run(pst_program *program, pst_pool *pool, const pst_step *step, int32_t first, int32_t last);
/* Nanoseconds that each operation took in the runs so far, on thread 0, barrier included: [num_ops]. Counting begins
 * with the first call and costs two clock reads per operation. */
PST_API void pst_program_profile(pst_program *program, int64_t *nanoseconds);
/* Whether PST_ATTEND reads pages that several sequences of a step have in common once for all of them (1, as at first), or for
 * each (0). It changes no bit. Pages that pst_group.tables name twice count as common: full-context layers, whole pages before the
 * step, chunks of 256 tokens. */
PST_API void pst_program_share(pst_program *program, int32_t shares);
/* How many keys of a kv head PST_ATTEND has looked up in the runs so far (as many values). */
PST_API int64_t pst_program_keys_read(const pst_program *program);
/* How many more it would have looked up, had it read for each what several sequences have in common. */
PST_API int64_t pst_program_keys_shared(const pst_program *program);

/* Between runs: the panels of matrix `index` of p[pointer] of a PST_EXPERTS, operation number `op`, lie at `data` (64-byte aligned)
 * from now on. Biases and orders stay where they are. What it had may be freed. 0, or -1 if there is no such matrix. */
PST_API int32_t pst_program_move(pst_program *program, int32_t op, int32_t pointer, int32_t index, const void *data);

/* ---- sampling ------------------------------------------------------------------------------------------------
 *
 * Tokens out of rows of logits [V], in the order of penstock.runner: health, then the first largest, or temperature,
 * min-p, top-k, top-p and a draw. Weights are whole numbers of 2^-42 of the likeliest token's, and their sums exact.
 * The draw j of a row is Philox4x32-10 of (seed, sample_index + j, position), and names the first token, in order of
 * ids, whose running sum exceeds that share of the whole.
 */
typedef struct pst_sample_row {
    const float *logits; /* [V], only read */
    double scale;        /* log2(e) / temperature; 0: greedy */
    double min_p, top_p; /* 0 and 1: off */
    uint64_t seed, position;
    int32_t top_k; /* 0 or below: off */
    int32_t sample_index;
    int32_t num_tokens; /* wanted; 0: only what follows */
    int32_t best;       /* out: the first largest */
    int32_t *tokens;    /* out: [num_tokens]; `best` if the row is not healthy */
    float peak;         /* out: its logit */
    int32_t healthy;    /* out: 1 if no logit is a NaN and the largest is finite */
} pst_sample_row;

typedef struct pst_logprob_row {
    const float *logits;   /* [V], healthy */
    const int32_t *tokens; /* [num_tokens] whose ranks are wanted */
    int32_t num_tokens;
    int32_t num_top;  /* how many of the likeliest are wanted */
    int32_t *ranks;   /* out: [num_tokens], 1 the likeliest, equals in order of their ids */
    int32_t *top_ids; /* out: [min(num_top, V)], likeliest first */
    uint64_t total;   /* out: sum of 2^42 e^(logit - peak), each rounded: the log of the sum is peak + log(total / 2^42) */
    float peak;       /* out: the largest logit */
    int32_t unused;
} pst_logprob_row;

typedef struct pst_sampler pst_sampler;
/* Memory for rows of `vocab` logits and pools of up to `threads`. NULL: no memory, or 2^21 tokens and more. */
PST_API pst_sampler *pst_sampler_new(int32_t vocab, int32_t threads);
PST_API void pst_sampler_free(pst_sampler *sampler);
/* 0, or -1 if the pool has more threads than the sampler was made for. */
PST_API int32_t pst_sample(pst_sampler *sampler, pst_pool *pool, pst_sample_row *rows, int32_t count);
/* 0, or -1; also for tokens that are not in the vocabulary. */
PST_API int32_t pst_logprobs(pst_sampler *sampler, pst_pool *pool, pst_logprob_row *rows, int32_t count);

/* ---- keys and values as a stream of bits ----------------------------------------------------------------------- */

/* x [layers, tokens, heads, dim] of `dtype` (PST_F32, PST_F16, PST_BF16), at most 4,096 tokens. Numbers are rounded to steps
 * of bins[layer] quarters of the median range of a head's components; a head that holds no number comes back as none. Returns
 * the bytes that it takes in `out`, -1 if there are fewer than that, or a shape cannot be.
 * Source: CacheGen, Liu et al., arXiv 2310.07240, section 5. */
PST_API int64_t pst_kv_encode(const void *x, int32_t dtype, int32_t layers, int32_t tokens, int32_t heads, int32_t dim,
                              const float *bins, uint8_t *out, int64_t size);
/* What pst_kv_encode rounded to, bit for bit. 0, or -1 if it did not write this; then x holds anything. */
PST_API int32_t pst_kv_decode(const uint8_t *in, int64_t size, int32_t dtype, int32_t layers, int32_t tokens, int32_t heads,
                              int32_t dim, void *x);

/* ---- limits -------------------------------------------------------------------------------------------------- */

/* Read `bytes` from `data` with all threads of the pool; the sum keeps the reads alive. */
PST_API uint64_t pst_read(pst_pool *pool, const void *data, int64_t bytes);
/* Multiply-adds in registers alone, as a product of rows `act` with a matrix of `format` does them, `turns` rounds on every
 * thread of the pool. Returns the operations that were done (a multiply-add counts two), -1 if there is no such product. */
PST_API int64_t pst_multiply(pst_pool *pool, int32_t format, int32_t act, int64_t turns);

#ifdef __cplusplus
}
#endif
#endif
