// A flat list of operations, run by all threads of a pool in step.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cache.h"
#include "ops.h"
#include "prefixes.h"
#include "rounding.h"

namespace pst {

namespace {

OpPtr make(const pst_op& op, const Maker& maker) {
    switch (op.kind) {
        case PST_NORM: return make_norm(op, maker);
        case PST_LINEAR: return make_linear(op, maker);
        case PST_LATENT: return make_latent(op, maker);
        case PST_ROPE: return make_rope(op, maker);
        case PST_WRITE:
        case PST_ATTEND:
        case PST_ATTEND_PART: return make_cache(op, maker);
        case PST_CHOOSE: return make_choose(op, maker);
        case PST_REHEARSE: return make_rehearse(op, maker);
        case PST_ROUTE: return make_route(op, maker);
        case PST_EXPERTS: return make_experts(op, maker);
        case PST_SPREAD:
        case PST_WEIGH_STREAMS:
        case PST_COLLAPSE_STREAMS:
        case PST_MIX_STREAMS: return make_connections(op, maker);
        case PST_WRITE_ENTRIES:
        case PST_CHOOSE_ENTRIES:
        case PST_ATTEND_ENTRIES: return make_entries(op, maker);
        case PST_LERP:
        case PST_REMOVAL_KEY:
        case PST_REPLACEMENT_KEY:
        case PST_VALUE_BONUS: return make_rwkv_rows(op, maker);
        case PST_CUT_OFF:
        case PST_STREAMS:
        case PST_MATCH: return make_streams(op, maker);
        case PST_ATTEND_TEXT: return make_attend_text(op, maker);
        case PST_BIASED_HEADS: return make_biased_heads(op, maker);
        case PST_ADAPT: return make_adapt(op, maker);
        case PST_ADAPT_CODES: return make_adapt_codes(op, maker);
        case PST_GATHER: return make_gather(op, maker);
        case PST_MERGE: return make_merge(op, maker);
        case PST_SEND:
        case PST_RECEIVE: return make_passing(op, maker);
        default: return op.kind >= PST_CONV ? make_state(op, maker) : make_pointwise(op, maker);
    }
}

}  // namespace

}  // namespace pst

struct pst_program {
    std::vector<pst_register> registers;
    std::vector<std::vector<pst_plane>> planes;
    std::vector<pst::OpPtr> ops;
    int32_t max_tokens = 0, max_rows = 0, threads = 1;
    int64_t shared_bytes = 0, own_bytes = 0;
    uint8_t* scratch = nullptr;
    size_t scratch_size = 0;
    bool keeps_states = false;
    std::vector<int> held_groups;  // whose pst_group.held are looked at
    std::vector<std::unique_ptr<pst::PrefixOrder>> orders;  // [groups], null where nobody asks
    std::vector<pst::Prefixes> prefixes;                    // of the step that runs
    bool shares = true;
    std::vector<int64_t> keys_read;  // by thread, each in a cache line of its own: read, and shared
    bool profiling = false;
    std::vector<int64_t> nanoseconds;

    ~pst_program() {
        if (scratch) munmap(scratch, scratch_size);
    }
};

namespace {

struct Job {
    pst_program* program;
    const pst_step* step;
    int32_t first, last;
    uint64_t* progress;
};

void run_job(pst::Team& team, void* argument) {
    pst::PlainRounding rounding;
    Job& job = *static_cast<Job*>(argument);
    pst_program& program = *job.program;
    pst::Context context{
        *job.step, program.scratch, program.scratch + program.shared_bytes + team.id * program.own_bytes,
        program.prefixes.data(), &program.keys_read[size_t(team.id) * 8]};
    bool timed = program.profiling && team.id == 0;
    int64_t since = timed ? pst::now_ns() : 0;
    for (int32_t i = job.first; i < job.last; i++) {
        program.ops[size_t(i)]->run(team, context);
        if (i + 1 < job.last) program.ops[size_t(i) + 1]->warm(team, context);
        team.barrier();
        if (job.progress && team.id == 0) __atomic_store_n(job.progress, *job.progress + 1, __ATOMIC_RELAXED);
        if (!timed) continue;
        int64_t now = pst::now_ns();
        program.nanoseconds[size_t(i)] += now - since;
        since = now;
    }
}

}  // namespace

extern "C" {

pst_program* pst_program_new(const pst_op* ops, int32_t num_ops, const pst_register* registers, int32_t num_registers,
                             const pst_plane* planes, const int32_t* planes_of, int32_t num_groups, int32_t max_tokens,
                             int32_t max_rows, int32_t threads, char* error, int32_t error_size) {
    auto program = std::make_unique<pst_program>();
    int32_t at = 0;
    try {
        pst::check(max_tokens > 0 && max_rows > 0 && threads > 0, "a program needs room for a token and a row");
        program->registers.assign(registers, registers + num_registers);
        for (int32_t g = 0; g < num_groups; g++)
            program->planes.emplace_back(planes + planes_of[g], planes + planes_of[g + 1]);
        program->orders.resize(size_t(num_groups));
        program->prefixes.resize(size_t(num_groups));
        program->keys_read.resize(size_t(threads) * 8);
        program->max_tokens = max_tokens;
        program->max_rows = max_rows;
        program->threads = threads;
        pst::Maker maker{program->registers, program->planes, max_tokens, max_rows, threads};
        for (at = 0; at < num_ops; at++) {
            program->ops.push_back(pst::make(ops[at], maker));
            program->keeps_states = program->keeps_states || program->ops.back()->keeps_state;
            if (int group = program->ops.back()->held_group; group >= 0) program->held_groups.push_back(group);
            if (int group = program->ops.back()->shares_group; group >= 0 && !program->orders[size_t(group)])
                program->orders[size_t(group)] = std::make_unique<pst::PrefixOrder>(max_tokens);
            program->shared_bytes = std::max(program->shared_bytes, pst::aligned(program->ops.back()->shared_bytes));
            program->own_bytes = std::max(program->own_bytes, pst::aligned(program->ops.back()->own_bytes));
        }
        // Half a page between the threads' scratch, so that equal offsets do not fall into the same cache sets.
        program->own_bytes += 2048 + 64;
        program->scratch_size = size_t(program->shared_bytes + program->own_bytes * threads + 64);
        void* memory = mmap(nullptr, program->scratch_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        pst::check(memory != MAP_FAILED, "no memory for scratch");
        program->scratch = static_cast<uint8_t*>(memory);
        madvise(memory, program->scratch_size, MADV_HUGEPAGE);
        program->nanoseconds.assign(size_t(num_ops), 0);
        return program.release();
    } catch (const std::exception& problem) {
        if (error && error_size > 0)
            std::snprintf(error, size_t(error_size), "operation %d (kind %d): %s", at, at < num_ops ? ops[at].kind : 0,
                          problem.what());
        return nullptr;
    }
}

void pst_program_free(pst_program* program) { delete program; }

int32_t pst_program_run(pst_program* program, pst_pool* pool, const pst_step* step, int32_t first, int32_t last) {
    if (step->num_tokens > program->max_tokens || step->num_rows > program->max_rows) return -1;
    if (size_t(step->num_groups) != program->planes.size()) return -1;
    if (step->mask && !pst::mask_fits(*step)) return -1;
    if (step->mask && program->keeps_states)
        for (int32_t t = 0; t < step->num_tokens; t++)
            if (step->mask[t]) return -1;
    for (int32_t g = 0; g < step->num_groups; g++)
        if (!pst::dropped_fits(*step, step->groups[g])) return -1;
    for (int group : program->held_groups)
        if (!step->groups[group].held) return -1;
    if (pool->threads > program->threads || first < 0 || size_t(last) > program->ops.size()) return -1;
    for (size_t g = 0; g < program->orders.size(); g++)
        program->prefixes[g] = program->orders[g] && program->shares ? program->orders[g]->of(*step, step->groups[g])
                                                                     : pst::Prefixes{};
    Job job{program, step, first, last, pool->progress};
    pool->run(run_job, &job);
    return 0;
}

int32_t pst_program_move(pst_program* program, int32_t op, int32_t pointer, int32_t index, const void* data) {
    if (op < 0 || size_t(op) >= program->ops.size()) return -1;
    return program->ops[size_t(op)]->move(pointer, index, data) ? 0 : -1;
}

void pst_program_share(pst_program* program, int32_t shares) { program->shares = shares != 0; }

int64_t pst_program_keys_read(const pst_program* program) {
    int64_t total = 0;
    for (size_t i = 0; i < program->keys_read.size(); i += 8) total += program->keys_read[i];
    return total;
}

int64_t pst_program_keys_shared(const pst_program* program) {
    int64_t total = 0;
    for (size_t i = 1; i < program->keys_read.size(); i += 8) total += program->keys_read[i];
    return total;
}

void pst_program_profile(pst_program* program, int64_t* nanoseconds) {
    program->profiling = true;
    std::memcpy(nanoseconds, program->nanoseconds.data(), program->nanoseconds.size() * sizeof(int64_t));
}

}  // extern "C"
