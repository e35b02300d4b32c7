// What Python fills in: one record per operation, and what all operations of a program know of the batch.
// `library.py` mirrors these structures field by field.
#pragma once

#include <cstdint>

constexpr int kAbi = 7;

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1 };

struct Batch {
    int64_t rows;            // tokens
    int64_t sequences;       // whose tokens follow each other
    const int64_t* counts;   // [sequences] query tokens
    const int64_t* lengths;  // [sequences] keys, the query tokens included
    const int64_t* starts;   // [sequences] where each block table begins in `blocks`
    const int64_t* blocks;   // block tables
    // Rows of adapters, in tiles of at most eight of the same slot. Null where no adapter is used.
    int64_t lora_tiles;
    const int64_t* lora_slots;   // [tiles]
    const int64_t* lora_firsts;  // [tiles + 1] places in `lora_rows`
    const int64_t* lora_rows;    // rows of adapters
    const int64_t* lora_of_row;  // [rows] slots, -1 for the base model
    int64_t lora_groups;
    const int64_t* lora_active;  // [groups] slots that occur
};

enum Op : int64_t { kGather, kNorm, kLinear, kRotary, kWriteKv, kAttention, kLora, kEmbedDelta, kMaxima, kDraw, kScores, kScreenRows, kScreenColumns, kScreenPick, kOps };

enum Form : int64_t { kRows, kPanels, kCompact };  // rows; panels, see `pack`; those of `compact.h`

struct Gather {  // out[t] = table[ids[t]]
    const void* table;
    const int64_t* ids;
    void* out;
    int64_t entries, width, table_dtype, out_dtype, form;
};

struct Norm {  // residual += x, if there is one; out = residual / sqrt(mean(residual^2) + eps) * weight
    const void* x;
    void* residual;  // or null
    const void* weight;
    void* out;
    int64_t width, x_dtype, residual_dtype, out_dtype;
    double eps;
};

enum Epilogue : int64_t { kPlain, kGated, kLogits };

struct LoraSite {  // a layer that adapters change
    int64_t in, parts;
    const int64_t* widths;  // [parts], together the layer's outputs
    int64_t gated;          // two parts of the same width, whose blocks lie side by side in a panel
};

struct LoraSlot {  // an adapter in a layer, packed: see `lora.h`. Rank 0: it leaves the layer as it is
    const void* a;
    const void* b;
    int64_t rank;
};

struct Lora {  // low[t] = x[t] @ a[slot].T for the rows of adapters; what the layer adds B's product of
    LoraSite site;
    const void* x;
    const LoraSlot* slots;
    void* low;  // [rows, low_stride], whole vectors for the largest rank
    int64_t x_stride, low_stride, dtype;
};

struct EmbedDelta {  // out[t] = a[slot][ids[t]] @ b[slot], zeros for the base model
    const int64_t* ids;
    const LoraSlot* slots;  // with `a` [vocabulary, rank], the rank made even
    float* out;             // [rows, width]
    int64_t width, dtype;
};

struct Linear {  // out = epilogue(x @ weight.T + bias + low @ b of the row's adapter)
    const void* x;
    const void* packed;  // panels, see `pack`
    const float* bias;   // padded and ordered as the panels' columns, or null
    const Lora* lora;    // of the same rows, run before, or null
    void* out;
    float* peaks;  // of kLogits: maxima of each 64 columns
    int64_t x_stride, out_stride, peaks_stride, in, out_width, dtype, epilogue;
    int64_t compact;  // not 0: the panels are those of `compact.h`
};

struct Rotary {  // in place
    void* x;
    const void* cos;  // [rows, dim], the halves equal
    const void* sin;  // [rows, dim], the first half negated
    int64_t stride, heads, dim, dtype, table_dtype;
};

struct WriteKv {
    const void* kv;
    void* cache;
    const int64_t* slots;
    int64_t stride;  // in bytes
    int64_t block_size, kv_heads, dim, dtype;
};

struct Attention {
    const void* query;
    const void* cache;  // blocks as `cache.h` says
    void* out;
    int64_t query_stride, out_stride, block_size, heads, kv_heads, dim, dtype;
    double scale;
};

struct Maxima {  // of each 64 values of a row, then of these
    const float* values;  // [rows, blocks * 64], or null: the blocks' maxima are there
    float* peaks;         // [rows, blocks]
    float* best;          // [rows]
    int64_t blocks;
};

struct Logits {
    const float* values;  // [rows, blocks * 64], with -inf behind the vocabulary
    const float* peaks;   // [rows, blocks]
    int64_t blocks, vocab;
};

struct Draw {  // tokens of some rows; all arrays are as long as these are many, and the batch has as many rows
    Logits x;
    const int64_t* rows;  // of `x`, or null: all
    const float* temperature;
    const int64_t* top_k;
    const double *top_p, *min_p;
    const double* uniform;  // or null: of the next three
    const int64_t *seeds, *choices, *positions;
    int64_t* tokens;
    float* thresholds;  // the least quotients that are kept
};

struct Scores {  // what of it is not null
    Logits x;
    int64_t* tokens;      // [rows] first greatest
    const float* limits;  // [rows]
    int64_t* above;       // [rows] how many are greater than the limit
    double* norms;        // [rows] log of the sum of e^x
    float* largest;       // [rows, count], descending
    int64_t* ids;         // [rows, count]
    int64_t count;
};

struct Screen {  // out[t] = the first greatest column of x[t] @ weight.T, -1 where that takes them all; in three stages
    const void* x;
    const void* packed;     // panels
    const uint8_t* coarse;  // the same in 8 bits, and their bounds: see `screen_pack`
    const float* bounds;
    int64_t* out;  // [rows]
    int64_t x_stride, in, vocab, dtype;
    int64_t compact;  // not 0: the panels are those of `compact.h`
};

struct Instruction {
    int64_t op;
    const void* record;
};
