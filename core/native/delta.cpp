// A schedule is the one solution of: an op is eligible `gap` after the last of its predecessors;
// a resource that serves by (eligible, row) starts an op at the later of that and the end of the
// op before it. So an edit is followed op by op, earliest first, as far as times change; where an
// op's turn changes, it changes places in its resource's order. Whatever order they are looked at
// in, the end is the same; by time, nearly every op is looked at once.
//
// Two things are not of that form, and are left to the whole replay: resources where priorities
// decide, and ops of one resource that become eligible at one instant of which one is set free by
// an op of no duration (see replay.cpp: it depends on who was asked first).
#include "delta.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace dpro {
namespace {

constexpr std::int64_t kLong = std::int64_t{1} << 44;  // ns, some hours

}  // namespace

Delta::Delta(const ReplayInput& in, const ReplayOutput& out)
    : base_ops_(in.ops), ops_(in.ops), queues_(in.resources), new_in_(in.ops, -1), new_out_(in.ops, -1),
      queued_(in.ops, -1) {
    succ_ptr_.assign(in.indptr, in.indptr + in.ops + 1);
    succ_.assign(in.indices, in.indices + in.edges);
    pred_ptr_.assign(in.ops + 1, 0);
    for (const std::int32_t after : succ_) ++pred_ptr_[after + 1];
    std::partial_sum(pred_ptr_.begin(), pred_ptr_.end(), pred_ptr_.begin());
    pred_.resize(succ_.size());
    std::vector<std::int64_t> at(pred_ptr_.begin(), pred_ptr_.end() - 1);
    for (std::int32_t row = 0; row < in.ops; ++row) {
        for (std::int64_t k = succ_ptr_[row]; k < succ_ptr_[row + 1]; ++k) pred_[at[succ_[k]]++] = row;
    }
    std::vector<std::int32_t> count(in.resources + 1, 0);
    for (std::int32_t row = 0; row < in.ops; ++row) {
        std::int64_t ready = 0;
        for (std::int64_t k = pred_ptr_[row]; k < pred_ptr_[row + 1]; ++k) ready = std::max(ready, out.end[pred_[k]]);
        ops_[row] = {in.duration[row], in.gap[row],      ready + in.gap[row], out.start[row], out.end[row],
                     in.resource[row], in.priority[row], out.cause[row],      -1,             -1,
                     true,             false};
        if (in.resource[row] >= 0) ++count[in.resource[row] + 1];
    }
    std::partial_sum(count.begin(), count.end(), count.begin());
    order_.resize(count[in.resources]);
    std::vector<std::int32_t> place(count.begin(), count.end() - 1);
    for (std::int32_t row = 0; row < in.ops; ++row) {
        if (in.resource[row] >= 0) order_[place[in.resource[row]]++] = row;
    }
    for (std::int32_t id = 0; id < in.resources; ++id) {
        Queue& queue = queues_[id];
        queue.begin = count[id];
        queue.end = count[id + 1];
        const auto begin = order_.begin() + queue.begin, end = order_.begin() + queue.end;
        std::sort(begin, end, [this](std::int32_t a, std::int32_t b) { return comes_first(a, b); });
        std::int64_t free = 0;
        std::int32_t last = -1;
        for (auto it = begin; it != end; ++it) {
            Op& op = ops_[*it];
            queue.simple &= op.start == std::max(op.eligible, free) && (last < 0 || op.priority == ops_[last].priority);
            queue.priority = op.priority;
            op.before = last;
            (last >= 0 ? ops_[last].after : queue.head) = *it;
            last = *it;
            free = op.end;
        }
    }
    by_end_.resize(in.ops);
    std::iota(by_end_.begin(), by_end_.end(), 0);
    std::sort(by_end_.begin(), by_end_.end(), [this](std::int32_t a, std::int32_t b) { return ops_[a].end > ops_[b].end; });
}

bool Delta::run(const DeltaEdit& changes, std::int64_t limit) {
    looked_at_ = 0;
    times_.clear();
    bool known = false;
    try {
        known = edit(changes);
        while (known && !events_.empty()) {
            const auto [time, op] = events_.top();
            events_.pop();
            if (queued_[op] != time) continue;  // it was moved to an earlier time since
            queued_[op] = -1;
            if (!ops_[op].alive) continue;
            known = ++looked_at_ <= limit && visit(op);
        }
    } catch (...) {
        roll_back();
        throw;
    }
    known = known && !closes_a_circle();
    if (known) collect();
    roll_back();
    return known;
}

// -- the edit ----------------------------------------------------------------------------------

bool Delta::edit(const DeltaEdit& changes) {
    const auto bad = [](const char* what) { throw std::invalid_argument(what); };
    const std::int32_t resources = static_cast<std::int32_t>(queues_.size());
    const std::int32_t total = base_ops_ + changes.added;
    const auto there = [&](std::int32_t op) { return op >= 0 && op < static_cast<std::int32_t>(ops_.size()) && ops_[op].alive; };
    for (std::int32_t i = 0; i < changes.changed + changes.added; ++i) {
        if (changes.resource[i] < -1 || changes.resource[i] >= resources) bad("resource out of range");
        if (changes.duration[i] < 0 || changes.gap[i] < 0) bad("negative duration or gap");
        if (changes.duration[i] >= kLong || changes.gap[i] >= kLong) return false;  // may not fit: whole replays check
    }
    for (std::int32_t i = 0; i < changes.removed; ++i) {
        const std::int32_t row = changes.removed_ops[i];
        if (row < 0 || row >= base_ops_ || !ops_[row].alive) bad("removes an op that is not there");
        Op& op = touch(row);
        op.alive = false;
        if (op.resource >= 0) {
            if (!queues_[op.resource].simple) return false;
            unlink(row);
        }
    }
    for (std::int32_t i = 0; i < changes.removed; ++i) told(changes.removed_ops[i]);
    ops_.resize(total);
    new_in_.resize(total, -1);
    new_out_.resize(total, -1);
    queued_.resize(total, -1);
    for (std::int32_t i = 0; i < changes.changed + changes.added; ++i) {
        const bool fresh = i >= changes.changed;
        const std::int32_t row = fresh ? base_ops_ + i - changes.changed : changes.changed_ops[i];
        if (fresh) {
            ops_[row] = {0, 0, 0, 0, 0, -1, 0, -1, -1, -1, true, true};
        } else if (row < 0 || row >= base_ops_ || !ops_[row].alive) {
            bad("changes an op that is not there");
        }
        Op& op = touch(row);
        const std::int32_t to = changes.resource[i];
        if (to >= 0) {
            Queue& queue = queues_[to];
            const bool first = queue.begin == queue.end;  // nobody uses it in the base: any priority will do
            if (!queue.simple || (!first && changes.priority[i] != queue.priority) || (first && changes.priority[i])) return false;
        }
        if (op.resource != to && op.resource >= 0) {
            if (!queues_[op.resource].simple) return false;
            unlink(row);
        }
        op.resource = to;
        op.duration = changes.duration[i];
        op.gap = changes.gap[i];
        op.priority = changes.priority[i];
    }
    for (std::int64_t i = 0; i < changes.edges; ++i) {
        const std::int32_t src = changes.edge_src[i], dst = changes.edge_dst[i];
        if (!there(src) || !there(dst)) bad("an edge of an op that is not there");
        if (new_in_[dst] < 0) new_dst_.push_back(dst);
        in_edges_.push_back({src, new_in_[dst]});
        new_in_[dst] = static_cast<std::int32_t>(in_edges_.size()) - 1;
        out_edges_.push_back({dst, new_out_[src]});
        new_out_[src] = static_cast<std::int32_t>(out_edges_.size()) - 1;
        touch(dst);
        touch(src);  // its new edges are to be taken back
    }
    // New ops enter an order when they are first visited: by then, mostly, what they wait for is known.
    for (const auto& [row, old] : saved_) {
        if (ops_[row].alive) push(old.alive && row < base_ops_ ? old.start : 0, row);
    }
    for (std::int32_t row = base_ops_; row < total; ++row) push(0, row);
    return true;
}

// -- one op ------------------------------------------------------------------------------------

bool Delta::visit(std::int32_t row) {
    std::int64_t ready = 0;
    std::int32_t cause = -1;
    each_pred(row, [&](std::int32_t before) {
        const std::int64_t end = ops_[before].end;
        if (end > ready || (end == ready && static_cast<std::uint32_t>(before) < static_cast<std::uint32_t>(cause))) {
            ready = end;
            cause = before;
        }
    });
    Op& op = touch(row);
    const bool moved = op.eligible != ready + op.gap;
    op.eligible = ready + op.gap;
    std::int64_t start = op.eligible;
    if (op.resource >= 0) {
        const Queue& queue = queues_[op.resource];
        if (!queue.simple) {
            // as long as it becomes eligible when it did and takes as long, nothing is decided otherwise
            if (moved || op.end - op.start != op.duration || row >= base_ops_ || may_be_freed_by_nothing(row)) return false;
            if (op.start == op.eligible) op.cause = cause;
            return true;
        }
        if (!place(row)) return false;
        if (op.before >= 0 && ops_[op.before].end > start) {
            start = ops_[op.before].end;
            cause = op.before;
        }
    }
    const std::int64_t end = start + op.duration;
    op.cause = cause;
    op.start = start;
    if (end != op.end) {
        op.end = end;
        told(row);
    } else if (op.duration == 0) {  // it may set others free at another place in the order of the same instant
        each_succ(row, [&](std::int32_t after) {
            if (ops_[after].gap == 0) push(end, after);
        });
    }
    return true;
}

// Tells those who wait for `row` that its end is another one, or that there is none.
void Delta::told(std::int32_t row) {
    const Op& op = ops_[row];
    const std::int64_t end = op.alive ? op.end : op.start;
    each_succ(row, [&](std::int32_t after) { push(end + ops_[after].gap, after); });
    if (op.alive && op.after >= 0) push(end, op.after);
}

void Delta::push(std::int64_t time, std::int32_t row) {
    if (queued_[row] >= 0 && queued_[row] <= time) return;
    queued_[row] = time;
    events_.push({time, row});
}

// Puts `row` where its eligible time has it be in its resource's order. False: only a whole replay knows.
bool Delta::place(std::int32_t row) {
    const Op& op = ops_[row];
    const bool linked = op.before >= 0 || queues_[op.resource].head == row;
    std::int32_t before = op.before, after = op.after;
    if (!linked) {
        before = find_before(row);
        after = before >= 0 ? ops_[before].after : queues_[op.resource].head;
    }
    if (!linked || (before >= 0 && comes_first(row, before)) || (after >= 0 && comes_first(after, row))) {
        if (linked) unlink(row);
        for (; before >= 0 && comes_first(row, before); before = ops_[before].before) after = before;
        for (; after >= 0 && comes_first(after, row); after = ops_[after].after) before = after;
        link(row, before, after);
    }
    for (const std::int32_t other : {before, after}) {
        if (other >= 0 && ops_[other].eligible == op.eligible && (freed_by_nothing(row) || freed_by_nothing(other))) return false;
    }
    return true;
}

bool Delta::comes_first(std::int32_t a, std::int32_t b) const {
    return ops_[a].eligible < ops_[b].eligible || (ops_[a].eligible == ops_[b].eligible && a < b);
}

// Whether it may have become eligible in the middle of the dispatches of an instant.
bool Delta::freed_by_nothing(std::int32_t row) const {
    if (ops_[row].gap > 0) return false;
    bool found = false;
    each_pred(row, [&](std::int32_t before) {
        found |= ops_[before].duration == 0 && ops_[before].end == ops_[row].eligible;
    });
    return found;
}

// The same whatever its predecessors' times, those that were removed among them.
bool Delta::may_be_freed_by_nothing(std::int32_t row) const {
    if (ops_[row].gap > 0) return false;
    bool found = false;
    for (std::int64_t k = pred_ptr_[row]; k < pred_ptr_[row + 1]; ++k) found |= ops_[pred_[k]].duration == 0;
    for (std::int32_t e = new_in_[row]; e >= 0; e = in_edges_[e].next) found |= ops_[in_edges_[e].op].duration == 0;
    return found;
}

// Whether new edges close a circle in which no time passes. (In any other one the ends would have grown without end.)
bool Delta::closes_a_circle() {
    std::vector<std::int32_t> left;
    std::vector<bool> seen;
    for (const std::int32_t dst : new_dst_) {
        for (std::int32_t e = new_in_[dst]; e >= 0; e = in_edges_[e].next) {
            const std::int32_t src = in_edges_[e].op;
            const std::int64_t instant = ops_[dst].end;
            if (ops_[src].start != instant || ops_[dst].start != instant) continue;
            seen.assign(ops_.size(), false);
            left.assign(1, dst);
            while (!left.empty()) {
                const std::int32_t row = left.back();
                left.pop_back();
                if (row == src) return true;
                if (seen[row] || ops_[row].start != instant || ops_[row].end != instant) continue;
                seen[row] = true;
                each_succ(row, [&](std::int32_t after) { left.push_back(after); });
            }
        }
    }
    return false;
}

// -- orders ------------------------------------------------------------------------------------

void Delta::link(std::int32_t row, std::int32_t before, std::int32_t after) {
    Op& op = touch(row);
    op.before = before;
    op.after = after;
    if (before >= 0) {
        touch(before).after = row;
    } else {
        set_head(op.resource, row);
    }
    if (after >= 0) {
        touch(after).before = row;
        push(ops_[after].eligible, after);
    }
}

void Delta::unlink(std::int32_t row) {
    Op& op = touch(row);
    const std::int32_t before = op.before, after = op.after;
    if (before >= 0) {
        touch(before).after = after;
    } else {
        if (queues_[op.resource].head != row) return;  // it has no place yet
        set_head(op.resource, after);
    }
    if (after >= 0) {
        touch(after).before = before;
        push(ops_[after].eligible, after);
    }
    op.before = op.after = -1;
}

void Delta::set_head(std::int32_t queue, std::int32_t row) {
    saved_heads_.emplace_back(queue, queues_[queue].head);
    queues_[queue].head = row;
}

// Of the base's order, one that comes about before `row`; -1 if there is none. Where ops have moved it may be a little
// off: place() walks on from it.
std::int32_t Delta::find_before(std::int32_t row) const {
    const Queue& queue = queues_[ops_[row].resource];
    std::int32_t low = queue.begin, high = queue.end;
    while (low < high) {
        const std::int32_t middle = low + (high - low) / 2;
        if (ops_[order_[middle]].eligible < ops_[row].eligible) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (std::int32_t at = low - 1; at >= queue.begin; --at) {
        const std::int32_t other = order_[at];
        const bool linked = ops_[other].before >= 0 || queue.head == other;
        if (other != row && linked && ops_[other].alive && ops_[other].resource == ops_[row].resource) return other;
    }
    return -1;
}

// -- begin and end of a run ----------------------------------------------------------------------

Delta::Op& Delta::touch(std::int32_t row) {
    Op& op = ops_[row];
    if (!op.touched) {
        saved_.emplace_back(row, op);
        op.touched = true;
    }
    return op;
}

void Delta::collect() {
    makespan_ = 0;
    for (const std::int32_t row : by_end_) {
        if (!ops_[row].touched) {
            makespan_ = ops_[row].end;
            break;
        }
    }
    const auto add = [this](std::int32_t row) {
        const Op& op = ops_[row];
        if (!op.alive) return;
        makespan_ = std::max(makespan_, op.end);
        times_.push_back({row, op.start, op.end, op.cause});
    };
    for (const auto& saved : saved_) add(saved.first);
    for (std::int32_t row = base_ops_; row < static_cast<std::int32_t>(ops_.size()); ++row) add(row);
}

void Delta::roll_back() {
    for (const auto& [row, old] : saved_) {
        ops_[row] = old;
        new_in_[row] = new_out_[row] = -1;
        queued_[row] = -1;
    }
    while (!events_.empty()) {
        queued_[events_.top().second] = -1;
        events_.pop();
    }
    for (auto it = saved_heads_.rbegin(); it != saved_heads_.rend(); ++it) queues_[it->first].head = it->second;
    saved_.clear();
    saved_heads_.clear();
    new_dst_.clear();
    in_edges_.clear();
    out_edges_.clear();
    ops_.resize(base_ops_);
    new_in_.resize(base_ops_);
    new_out_.resize(base_ops_);
    queued_.resize(base_ops_);
}

}  // namespace dpro
