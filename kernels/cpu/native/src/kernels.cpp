// The library: programs of operations, run by a pool of threads. Called through ctypes; see `abi.h`.
#include "abi.h"
#include "cache.h"
#include "draw.h"
#include "elementwise.h"
#include "gemm.h"
#include "lora.h"
#include "paired.h"
#include "pool.h"
#include "screen.h"

#ifndef ROPEWAY_KEY
#define ROPEWAY_KEY "none"
#endif

namespace {

// Rows that one task of a cheap operation takes.
constexpr int64_t kRowsEach = 8;

class Program {
   public:
    Program(const Instruction* instructions, int64_t count, const Batch& batch, int threads)
        : instructions_(instructions), count_(count), batch_(batch), threads_(threads), scratch_(threads) {}

    int phases() const { return (int)count_; }

    int64_t tasks(int phase) {
        const Instruction& i = instructions_[phase];
        if (batch_.rows == 0) return 0;
        if (i.op == kLinear) {
            return cut_linear(*(const Linear*)i.record, batch_.rows, threads_).tasks();
        }
        if (i.op == kAttention) {
            const Attention& a = *(const Attention*)i.record;
            if (const int64_t each = query_tokens(a); each != tiles_each_) {
                cut_queries(batch_, each, tiles_);
                tiles_each_ = each;
            }
            ahead_.aim(attention_behind(phase), batch_);
            const AttentionCut cut = cut_attention(a, (int64_t)tiles_.size(), threads_);
            return (cut.pairs + cut.each - 1) / cut.each;
        }
#if ROPEWAY_SCREEN
        if (i.op == kScreenRows) {
            screen_ = std::make_unique<ScreenSpace>(batch_.rows, ((const Screen*)i.record)->in, threads_);
        } else if (i.op == kScreenColumns) {
            return cut_screen(*(const Screen*)i.record, batch_.rows, threads_).tasks();
        } else if (i.op == kScreenPick) {
            return batch_.rows;
        }
#endif
        if (i.op == kMaxima || i.op == kDraw || i.op == kScores) return batch_.rows;
        if (i.op == kLora) return shrink_tasks(*(const Lora*)i.record, batch_);
        return (batch_.rows + kRowsEach - 1) / kRowsEach;
    }

    void run(int phase, int64_t task, int thread) {
        const Instruction& i = instructions_[phase];
        switch (i.op) {
            case kGather: return by_rows(task, *(const Gather*)i.record, run_gather);
            case kNorm: return by_rows(task, *(const Norm*)i.record, run_norm);
            case kRotary: return by_rows(task, *(const Rotary*)i.record, run_rotary);
            case kWriteKv: return run_write_kv(*(const WriteKv*)i.record, task * kRowsEach,
                                               std::min(batch_.rows, (task + 1) * kRowsEach));
#if ROPEWAY_SCREEN
            case kScreenRows: return by_rows(task, *(const Screen*)i.record, [this](const Screen& s, int64_t row) {
                run_screen_row(s, row, *screen_);
            });
            case kScreenColumns: return run_screen_columns(*(const Screen*)i.record, batch_.rows, task, thread, *screen_);
            case kScreenPick: return run_screen_pick(*(const Screen*)i.record, task, *screen_);
#endif
            case kLinear: return run_linear(*(const Linear*)i.record, batch_, ahead_, threads_, task);
            case kLora: return run_shrink(*(const Lora*)i.record, batch_, task);
            case kEmbedDelta: return by_rows(task, *(const EmbedDelta*)i.record, [this](const EmbedDelta& e, int64_t row) {
                return run_embed_delta(e, batch_, row);
            });
            case kMaxima: return run_maxima(*(const Maxima*)i.record, task);
            case kDraw: return run_draw(*(const Draw*)i.record, task);
            case kScores: return run_scores(*(const Scores*)i.record, task);
            case kAttention: return run_attention(*(const Attention*)i.record, batch_, tiles_, threads_, task,
                                                  scratch_[thread]);
        }
    }

   private:
    template <class Record, class Row>
    void by_rows(int64_t task, const Record& record, Row row) {
        const int64_t last = std::min(batch_.rows, (task + 1) * kRowsEach);
        for (int64_t t = task * kRowsEach; t < last; t++) row(record, t);
    }

    // The attention of the next layer, or null.
    const Attention* attention_behind(int64_t phase) const {
        for (int64_t i = phase + 1; i < count_; i++)
            if (instructions_[i].op == kAttention) return (const Attention*)instructions_[i].record;
        return nullptr;
    }

    const Instruction* instructions_;
    int64_t count_;
    Ahead ahead_;
    const Batch& batch_;
    int threads_;
    std::vector<Scratch> scratch_;
    std::vector<QueryTile> tiles_;
    int64_t tiles_each_ = 0;
#if ROPEWAY_SCREEN
    std::unique_ptr<ScreenSpace> screen_;
#endif
};

std::mutex guard;
std::unique_ptr<Pool<Program>> pool;
int wanted_threads = 1;
int wanted_spins = 2000;
std::vector<int> wanted_cpus;
bool repinned = false;

Pool<Program>& ready_pool() {
    if (pool && (pool->forked() || pool->threads() != wanted_threads || repinned)) pool.reset();
    if (!pool) pool = std::make_unique<Pool<Program>>(wanted_threads, wanted_cpus);
    repinned = false;
    pool->set_spins(wanted_spins);
    return *pool;
}

}  // namespace

extern "C" {

int64_t ropeway_abi() {
    return kAbi;
}

// What the library was built for; the loader compares it.
const char* ropeway_key() {
    return ROPEWAY_KEY;
}

const char* ropeway_paths() {
#if ROPEWAY_DPBF16
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#elif defined(__ARM_NEON)
    return "neon";
#else
    return "portable";
#endif
}

void ropeway_set_threads(int64_t threads, int64_t spins) {
    std::lock_guard<std::mutex> lock(guard);
    wanted_threads = (int)std::max<int64_t>(1, threads);
    wanted_spins = (int)std::max<int64_t>(0, spins);
}

void ropeway_set_affinity(const int64_t* cpus, int64_t count) {
    std::lock_guard<std::mutex> lock(guard);
    const std::vector<int> wanted(cpus, cpus + count);
    repinned = repinned || wanted != wanted_cpus;
    wanted_cpus = wanted;
}

int64_t ropeway_packed_bytes(int64_t out, int64_t in, int64_t dtype, int64_t gated) {
    const int64_t panels = gated ? (out / 2 + L - 1) / L : (out + NR - 1) / NR;
    return panels * (int64_t)panel_bytes(in, dtype);
}

// Bytes of the same panels compacted; 0 where they are not.
int64_t ropeway_compact_bytes(int64_t out, int64_t in, int64_t dtype, int64_t gated) {
    const int64_t panels = gated ? (out / 2 + L - 1) / L : (out + NR - 1) / NR;
    return compacts(panels, in, dtype) ? compact_sizes(panels, in).bytes() : 0;
}

int64_t ropeway_panel_columns() {
    return NR;
}

void ropeway_pack(const void* weight, int64_t out, int64_t in, int64_t dtype, int64_t gated, void* packed) {
    if (dtype == kBFloat16)
        pack_panels<bf16>((const bf16*)weight, out, in, gated != 0, (bf16*)packed);
    else
        pack_panels<float>((const float*)weight, out, in, gated != 0, (float*)packed);
}

// From packed panels; 0 if too many blocks have rare upper bytes.
int64_t ropeway_compact(const void* packed, int64_t out, int64_t in, int64_t gated, void* compact) {
#if ROPEWAY_DPBF16
    const int64_t panels = gated ? (out / 2 + L - 1) / L : (out + NR - 1) / NR;
    return compact_panels((const uint16_t*)packed, compact_sizes(panels, in), (char*)compact);
#else
    (void)packed, (void)out, (void)in, (void)gated, (void)compact;
    return 0;
#endif
}

// Whether this is what `ropeway_compact` has made for a weight of this size.
int64_t ropeway_compact_fits(const void* compact, int64_t out, int64_t in, int64_t gated) {
#if ROPEWAY_DPBF16
    const int64_t panels = gated ? (out / 2 + L - 1) / L : (out + NR - 1) / NR;
    return compact_fits(compact, compact_sizes(panels, in));
#else
    (void)compact, (void)out, (void)in, (void)gated;
    return 0;
#endif
}

// Bytes of an output matrix in 8 bits and floats of its bounds; both 0 where it is not screened here.
void ropeway_screen_sizes(int64_t out, int64_t in, int64_t* bytes, int64_t* floats) {
    const int64_t panels = ROPEWAY_SCREEN && in <= kMostScreened ? (out + NR - 1) / NR : 0;
    *bytes = panels * (int64_t)coarse_panel_bytes(in);
    *floats = panels * kPanelBounds;
}

// From packed panels; 0 if a column is not finite or too large, so that the matrix cannot be screened.
int64_t ropeway_screen_pack(const void* packed, int64_t out, int64_t in, int64_t dtype, int64_t compact, uint8_t* coarse,
                            float* bounds) {
#if ROPEWAY_SCREEN
    const Matrix matrix{packed, (out + NR - 1) / NR, in, dtype, compact != 0};
    if (dtype == kBFloat16) return screen_panels<bf16>(matrix, out, coarse, bounds);
    return screen_panels<float>(matrix, out, coarse, bounds);
#else
    (void)packed, (void)out, (void)in, (void)dtype, (void)compact, (void)coarse, (void)bounds;
    return 0;
#endif
}

// Elements of an adapter's A (`half` 0) and B (1) in a layer; rank: its largest.
int64_t ropeway_lora_elements(const LoraSite* site, int64_t rank, int64_t half) {
    if (half == 0) return low_panels(*site, rank) * L * even(site->in);
    return blocks_before(*site, site->parts) * L * even(rank);
}

// One part's matrices into memory of zeros; see `pack_lora`.
void ropeway_pack_lora(const LoraSite* site, int64_t part, const void* a, const void* b, int64_t rank, int64_t most,
                       int64_t dtype, void* packed_a, void* packed_b) {
    if (dtype == kBFloat16)
        pack_lora(*site, part, (const bf16*)a, (const bf16*)b, rank, most, (bf16*)packed_a, (bf16*)packed_b);
    else
        pack_lora(*site, part, (const float*)a, (const float*)b, rank, most, (float*)packed_a, (float*)packed_b);
}

// 0, or 1 more than the place of an unknown operation; nothing has run then.
int64_t ropeway_run(const Instruction* instructions, int64_t count, const Batch* batch) {
    for (int64_t i = 0; i < count; i++)
        if (instructions[i].op < 0 || instructions[i].op >= (ROPEWAY_SCREEN ? kOps : kScreenRows)) return i + 1;
    std::lock_guard<std::mutex> lock(guard);
    Pool<Program>& threads = ready_pool();
    Program program(instructions, count, *batch, threads.threads());
    threads.run(program);
    return 0;
}

}  // extern "C"
