// What Python fills in: one record per operation, and what all operations of a program know of the batch.
// `library.py` mirrors these structures field by field.
#pragma once

#include <cstdint>

constexpr int kAbi = 4;

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1 };

struct Batch {
    int64_t rows;            // tokens
    int64_t sequences;       // whose tokens follow each other
    const int64_t* counts;   // [sequences] query tokens
    const int64_t* lengths;  // [sequences] keys, the query tokens included
    const int64_t* starts;   // [sequences] where each block table begins in `blocks`
    const int64_t* blocks;   // block tables
    // Rows by adapter, in tiles of at most eight of the same slot; all rows are in one. Null where no adapter is used.
    int64_t lora_tiles;
    const int64_t* lora_slots;   // [tiles], -1 for the base model
    const int64_t* lora_firsts;  // [tiles + 1] places in `lora_rows`
    const int64_t* lora_rows;    // [rows]
};

enum Op : int64_t { kGather, kNorm, kLinear, kRotary, kWriteKv, kAttention, kLora, kScreenRows, kScreenColumns, kScreenPick, kOps };

struct Gather {  // out[t] = table[ids[t]]
    const void* table;
    const int64_t* ids;
    void* out;
    int64_t width, table_dtype, out_dtype;
    int64_t packed;  // not 0: the table lies in panels, see `pack`
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

struct Linear {  // out = epilogue(x @ weight.T + bias)
    const void* x;
    const void* packed;  // panels, see `pack`
    const float* bias;   // padded and ordered as the panels' columns, or null
    const float* delta;  // [rows, the weight's rows], added to the product, or null
    void* out;
    float* peaks;  // of kLogits: maxima of each 64 columns
    int64_t x_stride, out_stride, peaks_stride, delta_stride, in, out_width, dtype, epilogue;
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
    int64_t stride, row_bytes;
};

struct Attention {
    const void* query;
    const void* cache;  // [blocks, block_size, 2, kv_heads, dim]
    void* out;
    int64_t query_stride, out_stride, block_size, heads, kv_heads, dim, dtype;
    double scale;
};

struct Lora {  // out[t] = x[t] @ a[slot].T @ b[slot], part by part; zeros for the base model
    const void* x;
    const void* a;          // [slots, parts, max_rank, in]
    const void* b;          // [slots, max_rank, width]
    float* out;             // [rows, width]
    const int64_t* ranks;   // [slots]
    const int64_t* widths;  // [parts], together `width`
    int64_t x_stride, in, width, parts, max_rank, dtype;
};

struct Screen {  // out[t] = the first greatest column of x[t] @ weight.T, -1 where that takes them all; in three stages
    const void* x;
    const void* packed;     // panels
    const uint8_t* coarse;  // the same in 8 bits, and their bounds: see `screen_pack`
    const float* bounds;
    int64_t* out;  // [rows]
    int64_t x_stride, in, vocab, dtype;
};

struct Instruction {
    int64_t op;
    const void* record;
};
