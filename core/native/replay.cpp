// Semantics (the oracle in core/dpro/replay/oracle.py says the same in plain Python): events run
// in the order (time, phase, row or resource), phases FINISH < ELIGIBLE < DISPATCH; a resource
// that is free picks the smallest (priority, eligible time, row) among what is eligible.
//
// The oracle keeps one heap of all events. This engine needs none for most of them:
//  * An op whose start cannot depend on a choice (it has no resource, or its resource's ops form a
//    chain by their own edges, as on a host thread) gets its times as soon as its predecessors'
//    ends are known, be that in the simulated future. Only *dispatches* are ordered in time: the
//    heap holds resources, not ops.
//  * A FIFO resource may run ahead of the others: with L a lower bound on when anything not yet
//    known can become eligible, an op eligible before L is certain to be next.
// Both are exact for ops that take time: their end comes before every dispatch at that end. An op
// of zero duration on a resource ends in the middle of the dispatches of its own instant, so what
// it frees must not be seen by resources that picked before: those ops always take their place in
// the heap's order.
#include "replay.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

namespace dpro {
namespace {

constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLongest = std::int64_t{1} << 62;

// What is known of an op before it is eligible; one cache line serves an edge.
struct Waiting {
    std::int64_t ready = 0;     // latest end among the predecessors seen
    std::int32_t pending = 0;   // predecessors not seen
    std::int32_t cause = -1;    // the predecessor that ended at `ready` (smallest row of equals)
};

// A resource and its queue. Rows wait in (eligible, row) order: `run` is a sorted array that takes
// what arrives in order (nearly everything), `heap` the rest. Both live in the resource's slice
// [begin, limit) of one slab, run from the front and heap from the back: each op enters once, so
// they cannot meet.
struct Resource {
    std::int64_t free = 0;  // end of the last op
    std::int32_t last = -1;
    std::int32_t begin = 0, limit = 0;
    std::int32_t head = 0, tail = 0;  // run, absolute
    std::int32_t heap = 0;            // rows in heap
    std::int32_t slot = -1;           // place in the agenda
    std::int32_t first = -1;          // first row, while scanning
    bool chained = true, mixed = false;

    bool has_future() const { return head != tail || heap != 0; }
};

struct Dispatch {
    std::int64_t time;
    std::int32_t resource;

    bool operator<(const Dispatch& other) const {
        return time < other.time || (time == other.time && resource < other.resource);
    }
};

class Engine {
  public:
    Engine(const ReplayInput& in, const ReplayOutput& out)
        : in_(in), out_(out), waiting_(in.ops), resources_(in.resources), ready_(in.resources) {}

    ReplaySummary run() {
        scan();
        for (std::int32_t row = 0; row < in_.ops; ++row) {
            if (waiting_[row].pending == 0 && out_.start[row] < 0) known(row);
            propagate();
        }
        while (!agenda_.empty()) serve();
        return {done_, makespan_, bytes()};
    }

  private:
    const ReplayInput& in_;
    const ReplayOutput& out_;
    std::vector<Waiting> waiting_;
    std::vector<Resource> resources_;
    std::vector<std::vector<std::int32_t>> ready_;  // eligible rows of mixed-priority resources, heaps
    std::vector<std::int32_t> slab_;
    std::vector<Dispatch> agenda_;                  // 4-ary heap: next dispatch of each resource with work
    std::vector<std::int32_t> ended_;               // rows whose successors are to be told
    std::int64_t makespan_ = 0;
    std::int32_t done_ = 0;

    // One pass from the last row to the first: checks, counts predecessors, and finds the chained
    // resources: those where every op has an edge to the resource's next row.
    void scan() {
        const auto bad = [](const char* what) { throw std::invalid_argument(what); };
        if (in_.indptr[0] != 0 || in_.indptr[in_.ops] != in_.edges) bad("indptr does not span indices");
        std::uint64_t total = 0;
        for (std::int32_t row = in_.ops - 1; row >= 0; --row) {
            const std::int32_t id = in_.resource[row];
            if (id < -1 || id >= in_.resources) bad("resource out of range");
            if (in_.duration[row] < 0 || in_.gap[row] < 0) bad("negative duration or gap");
            if (in_.duration[row] >= kLongest || in_.gap[row] >= kLongest) bad("times do not fit 62 bits");
            total += static_cast<std::uint64_t>(in_.duration[row]) + static_cast<std::uint64_t>(in_.gap[row]);
            if (total >= static_cast<std::uint64_t>(kLongest)) bad("times do not fit 62 bits");
            const std::int64_t from = in_.indptr[row], to = in_.indptr[row + 1];
            if (from < 0 || from > to || to > in_.edges) bad("indptr is not increasing");
            const std::int32_t next = id < 0 ? -1 : resources_[id].first;
            bool linked = next < 0;
            for (std::int64_t k = from; k < to; ++k) {
                const std::int32_t after = in_.indices[k];
                if (after < 0 || after >= in_.ops) bad("successor out of range");
                ++waiting_[after].pending;
                linked |= after == next;
            }
            out_.start[row] = -1;
            out_.end[row] = -1;
            out_.cause[row] = -1;
            if (id < 0) continue;
            Resource& r = resources_[id];
            ++r.limit;
            r.chained &= linked;
            r.mixed |= next >= 0 && in_.priority[row] != in_.priority[next];
            r.first = row;
        }
        std::int32_t at = 0;
        for (Resource& r : resources_) {
            r.begin = r.head = r.tail = at;
            at += r.limit;
            r.limit = at;
        }
        slab_.resize(at);
    }

    // -- ops ---------------------------------------------------------------------------------

    // Every predecessor of `row` has a known end.
    void known(std::int32_t row) {
        const Waiting& w = waiting_[row];
        const std::int64_t eligible = w.ready + in_.gap[row];
        const std::int32_t id = in_.resource[row];
        out_.start[row] = eligible;
        out_.cause[row] = w.cause;
        if (id < 0 || (resources_[id].chained && in_.duration[row] > 0)) {
            finish(row, eligible);
        } else {
            enqueue(id, row, eligible);
        }
    }

    void finish(std::int32_t row, std::int64_t start) {
        const std::int64_t end = start + in_.duration[row];
        out_.end[row] = end;
        makespan_ = std::max(makespan_, end);
        ++done_;
        if (in_.indptr[row] != in_.indptr[row + 1]) ended_.push_back(row);
    }

    void propagate() {
        while (!ended_.empty()) {
            const std::int32_t row = ended_.back();
            ended_.pop_back();
            const std::int64_t end = out_.end[row];
            for (std::int64_t k = in_.indptr[row], to = in_.indptr[row + 1]; k < to; ++k) {
                const std::int32_t after = in_.indices[k];
                Waiting& w = waiting_[after];
                // unsigned: no cause yet (-1) is the largest row
                const auto first_of_equals = static_cast<std::uint32_t>(row) < static_cast<std::uint32_t>(w.cause);
                if (end > w.ready || (end == w.ready && first_of_equals)) {
                    w.ready = end;
                    w.cause = row;
                }
                if (--w.pending == 0) known(after);
            }
        }
    }

    // -- queues ------------------------------------------------------------------------------

    bool earlier(std::int32_t a, std::int32_t b) const {
        const std::int64_t ea = out_.start[a], eb = out_.start[b];
        return ea < eb || (ea == eb && a < b);
    }

    void enqueue(std::int32_t id, std::int32_t row, std::int64_t eligible) {
        Resource& r = resources_[id];
        if (r.head == r.tail) r.head = r.tail = r.begin;
        if (r.head == r.tail || earlier(slab_[r.tail - 1], row)) {
            slab_[r.tail++] = row;
        } else {
            // Heap item i lies at slab_[limit - 1 - i].
            std::int32_t* const top = &slab_[r.limit - 1];
            std::int32_t at = r.heap++;
            while (at > 0) {
                const std::int32_t parent = (at - 1) / 2;
                if (!earlier(row, top[-parent])) break;
                top[-at] = top[-parent];
                at = parent;
            }
            top[-at] = row;
        }
        plan(id, std::max(r.free, eligible));
    }

    // The waiting row with the smallest (eligible, row); there must be one.
    std::int32_t front(const Resource& r) const {
        if (r.heap == 0) return slab_[r.head];
        const std::int32_t top = slab_[r.limit - 1];
        return r.head != r.tail && earlier(slab_[r.head], top) ? slab_[r.head] : top;
    }

    void pop_front(Resource& r, std::int32_t row) {
        if (r.head != r.tail && slab_[r.head] == row) {
            ++r.head;
            return;
        }
        std::int32_t* const top = &slab_[r.limit - 1];
        const std::int32_t size = --r.heap;
        const std::int32_t moved = top[-size];
        std::int32_t at = 0;
        for (std::int32_t child; (child = 2 * at + 1) < size; at = child) {
            if (child + 1 < size && earlier(top[-child - 1], top[-child])) ++child;
            if (!earlier(top[-child], moved)) break;
            top[-at] = top[-child];
        }
        top[-at] = moved;
    }

    std::int32_t pick(std::int32_t id, std::int64_t time) {
        Resource& r = resources_[id];
        if (!r.mixed) {
            const std::int32_t row = front(r);
            pop_front(r, row);
            return row;
        }
        std::vector<std::int32_t>& ready = ready_[id];
        const auto worse = [this](std::int32_t a, std::int32_t b) {
            const std::int32_t pa = in_.priority[a], pb = in_.priority[b];
            return pa > pb || (pa == pb && earlier(b, a));
        };
        while (r.has_future()) {
            const std::int32_t row = front(r);
            if (out_.start[row] > time) break;
            pop_front(r, row);
            ready.push_back(row);
            std::push_heap(ready.begin(), ready.end(), worse);
        }
        std::pop_heap(ready.begin(), ready.end(), worse);
        const std::int32_t row = ready.back();
        ready.pop_back();
        return row;
    }

    // When `id` next picks: never, if nothing waits.
    std::int64_t next_time(std::int32_t id) const {
        const Resource& r = resources_[id];
        if (r.mixed && !ready_[id].empty()) return r.free;
        return r.has_future() ? std::max(r.free, out_.start[front(r)]) : kForever;
    }

    // Takes the first dispatch of the agenda, and those after it on the same resource that are
    // next in order or certain.
    void serve() {
        const std::int32_t id = agenda_[0].resource;
        std::int64_t time = agenda_[0].time;
        Resource& r = resources_[id];
        agenda_[0].time = -1;  // stays first, whatever propagate() adds
        for (;;) {
            const std::int32_t row = pick(id, time);
            if (time > out_.start[row]) {
                out_.start[row] = time;
                out_.cause[row] = r.last;
            }
            r.last = row;
            r.free = time + in_.duration[row];
            finish(row, time);
            propagate();
            time = next_time(id);
            if (time == kForever) {
                remove_first();
                return;
            }
            const Dispatch other = second();
            if (Dispatch{time, id} < other) continue;
            if (!r.mixed) {
                // Waits for this resource alone, and whatever is not known yet follows an op still
                // to start: elsewhere at other.time or later, or here after this one.
                const std::int32_t next = front(r);
                if (out_.start[next] < other.time && in_.duration[next] > 0) continue;
            }
            sift_down(0, {time, id});
            return;
        }
    }

    // -- agenda ------------------------------------------------------------------------------

    void place(std::size_t at, Dispatch item) {
        agenda_[at] = item;
        resources_[item.resource].slot = static_cast<std::int32_t>(at);
    }

    void plan(std::int32_t id, std::int64_t time) {
        std::int32_t slot = resources_[id].slot;
        if (slot < 0) {
            slot = static_cast<std::int32_t>(agenda_.size());
            agenda_.push_back({time, id});
        } else if (agenda_[slot].time <= time) {
            return;
        }
        const Dispatch item{time, id};
        std::size_t at = static_cast<std::size_t>(slot);
        while (at > 0) {
            const std::size_t parent = (at - 1) / 4;
            if (!(item < agenda_[parent])) break;
            place(at, agenda_[parent]);
            at = parent;
        }
        place(at, item);
    }

    void sift_down(std::size_t at, Dispatch item) {
        const std::size_t size = agenda_.size();
        for (;;) {
            std::size_t best = 4 * at + 1;
            if (best >= size) break;
            for (std::size_t child = best + 1, stop = std::min(best + 4, size); child < stop; ++child) {
                if (agenda_[child] < agenda_[best]) best = child;
            }
            if (!(agenda_[best] < item)) break;
            place(at, agenda_[best]);
            at = best;
        }
        place(at, item);
    }

    void remove_first() {
        resources_[agenda_[0].resource].slot = -1;
        const Dispatch moved = agenda_.back();
        agenda_.pop_back();
        if (!agenda_.empty()) sift_down(0, moved);
    }

    Dispatch second() const {
        Dispatch best{kForever, 0};
        for (std::size_t child = 1, stop = std::min<std::size_t>(5, agenda_.size()); child < stop; ++child) {
            best = std::min(best, agenda_[child]);
        }
        return best;
    }

    // Capacities only grow, so what they are at the end was the peak.
    std::size_t bytes() const {
        std::size_t total = sizeof(Engine) + waiting_.capacity() * sizeof(Waiting) + slab_.capacity() * sizeof(slab_[0]) +
                            resources_.capacity() * (sizeof(Resource) + sizeof(ready_[0])) +
                            agenda_.capacity() * sizeof(Dispatch) + ended_.capacity() * sizeof(ended_[0]);
        for (const auto& ready : ready_) total += ready.capacity() * sizeof(ready[0]);
        return total;
    }
};

}  // namespace

ReplaySummary replay(const ReplayInput& in, const ReplayOutput& out) { return Engine(in, out).run(); }

}  // namespace dpro
