// Delta replay: the schedule of a graph that differs little from one whose schedule is known.
// Knows arrays of numbers only, as replay.hpp does, and gives the very times that it would.
#pragma once

#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "replay.hpp"

namespace dpro {

// What differs. Pointers are borrowed for the call. Ops are rows of the base; new ones follow them.
struct DeltaEdit {
    std::int32_t changed, added, removed;
    std::int64_t edges;
    const std::int32_t* changed_ops;  // [changed]; an op may come once
    const std::int32_t* resource;     // [changed + added], as of ReplayInput: of the changed ops, then of the new ones
    const std::int64_t* duration;
    const std::int64_t* gap;
    const std::int32_t* priority;
    const std::int32_t* removed_ops;  // [removed]: with all of their edges
    const std::int32_t* edge_src;     // [edges] new edges, between ops that are there
    const std::int32_t* edge_dst;
};

// Times of one op.
struct DeltaTime {
    std::int32_t op;
    std::int64_t start, end;
    std::int32_t cause;
};

class Delta {
  public:
    // `in` and its schedule `out`, which is complete.
    Delta(const ReplayInput& in, const ReplayOutput& out);

    // Whether the times could be told; they are in makespan() and times(). If not (more than `limit` ops to look at, a
    // resource where priorities decide, an instant whose order only a whole replay knows, a cycle): nothing is.
    // The base stays what it is. Throws std::invalid_argument for an edit that does not fit the base.
    bool run(const DeltaEdit& edit, std::int64_t limit);

    std::int64_t makespan() const { return makespan_; }
    // Ops whose times may differ from the base's, new ones included; without removed ones.
    const std::vector<DeltaTime>& times() const { return times_; }
    std::int64_t looked_at() const { return looked_at_; }

  private:
    struct Op {
        std::int64_t duration, gap, eligible, start, end;
        std::int32_t resource, priority, cause;
        std::int32_t before, after;  // neighbours in the order in which the resource serves
        bool alive, touched;
    };
    struct Queue {
        std::int32_t begin = 0, end = 0;  // its slice of order_
        std::int32_t priority = 0;
        std::int32_t head = -1;  // the first op it serves
        bool simple = true;  // serves by (eligible, row), and nothing else decides
    };
    struct Edge {
        std::int32_t op, next;
    };
    using Event = std::pair<std::int64_t, std::int32_t>;  // time, op

    std::int32_t base_ops_;
    std::vector<Op> ops_;
    std::vector<Queue> queues_;
    std::vector<std::int32_t> order_;  // ops by resource, in the base's order
    std::vector<std::int64_t> succ_ptr_, pred_ptr_;
    std::vector<std::int32_t> succ_, pred_;
    std::vector<std::int32_t> by_end_;  // base ops, latest end first

    // of one run
    std::vector<std::pair<std::int32_t, Op>> saved_;
    std::vector<std::pair<std::int32_t, std::int32_t>> saved_heads_;
    std::vector<std::int32_t> new_in_, new_out_;  // op -> its first new edge, -1 none
    std::vector<std::int32_t> new_dst_;              // ops with a new edge to them
    std::vector<Edge> in_edges_, out_edges_;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
    std::vector<std::int64_t> queued_;  // time under which an op waits in events_, -1: it does not
    std::vector<DeltaTime> times_;
    std::int64_t makespan_ = 0, looked_at_ = 0;

    Op& touch(std::int32_t op);
    void push(std::int64_t time, std::int32_t op);
    bool edit(const DeltaEdit& edit);
    bool visit(std::int32_t op);
    bool place(std::int32_t op);
    void link(std::int32_t op, std::int32_t before, std::int32_t after);
    void unlink(std::int32_t op);
    void set_head(std::int32_t queue, std::int32_t op);
    std::int32_t find_before(std::int32_t op) const;
    bool comes_first(std::int32_t a, std::int32_t b) const;
    bool freed_by_nothing(std::int32_t op) const;
    bool may_be_freed_by_nothing(std::int32_t op) const;
    bool closes_a_circle();
    void told(std::int32_t op);
    void collect();
    void roll_back();

    template <typename F>
    void each_pred(std::int32_t op, F&& f) const {
        if (op < base_ops_) {
            for (std::int64_t k = pred_ptr_[op]; k < pred_ptr_[op + 1]; ++k) {
                if (ops_[pred_[k]].alive) f(pred_[k]);
            }
        }
        for (std::int32_t e = new_in_[op]; e >= 0; e = in_edges_[e].next) f(in_edges_[e].op);
    }
    template <typename F>
    void each_succ(std::int32_t op, F&& f) const {
        if (op < base_ops_) {
            for (std::int64_t k = succ_ptr_[op]; k < succ_ptr_[op + 1]; ++k) {
                if (ops_[succ_[k]].alive) f(succ_[k]);
            }
        }
        for (std::int32_t e = new_out_[op]; e >= 0; e = out_edges_[e].next) f(out_edges_[e].op);
    }
};

}  // namespace dpro
