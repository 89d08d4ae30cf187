// Python's door to the native core: checks shapes, borrows the arrays, releases the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "delta.hpp"
#include "replay.hpp"

namespace py = pybind11;

void bind_schedule(py::module_& module);  // schedule_module.cpp
void bind_wire(py::module_& module);      // wire_module.cpp

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// A view of the arrays as the engine takes them; checks that they agree in length.
dpro::ReplayInput input(const Array<std::int32_t>& resource, const Array<std::int64_t>& duration, const Array<std::int64_t>& gap,
                        const Array<std::int32_t>& priority, const Array<std::int64_t>& indptr,
                        const Array<std::int32_t>& indices, std::int32_t resources) {
    const py::ssize_t ops = resource.size();
    if (ops >= std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("too many ops");
    if (duration.size() != ops || gap.size() != ops || priority.size() != ops || indptr.size() != ops + 1 || resources < 0) {
        throw std::invalid_argument("arrays of one graph must agree in length");
    }
    return {static_cast<std::int32_t>(ops), resources, indices.size(), resource.data(), duration.data(),
            gap.data(), priority.data(), indptr.data(), indices.data()};
}

py::tuple replay(const Array<std::int32_t>& resource, const Array<std::int64_t>& duration, const Array<std::int64_t>& gap,
                 const Array<std::int32_t>& priority, const Array<std::int64_t>& indptr,
                 const Array<std::int32_t>& indices, std::int32_t resources) {
    const dpro::ReplayInput in = input(resource, duration, gap, priority, indptr, indices, resources);
    Array<std::int64_t> start(in.ops), end(in.ops);
    Array<std::int32_t> cause(in.ops);
    const dpro::ReplayOutput out{start.mutable_data(), end.mutable_data(), cause.mutable_data()};
    dpro::ReplaySummary summary{};
    {
        py::gil_scoped_release released;
        summary = dpro::replay(in, out);
    }
    return py::make_tuple(start, end, cause, summary.makespan, summary.done, summary.working_bytes);
}

std::unique_ptr<dpro::Delta> delta(const Array<std::int32_t>& resource, const Array<std::int64_t>& duration,
                                   const Array<std::int64_t>& gap, const Array<std::int32_t>& priority,
                                   const Array<std::int64_t>& indptr, const Array<std::int32_t>& indices,
                                   std::int32_t resources, Array<std::int64_t>& start, Array<std::int64_t>& end,
                                   Array<std::int32_t>& cause) {
    const dpro::ReplayInput in = input(resource, duration, gap, priority, indptr, indices, resources);
    if (start.size() != in.ops || end.size() != in.ops || cause.size() != in.ops) {
        throw std::invalid_argument("a schedule has a row for each op");
    }
    const dpro::ReplayOutput out{start.mutable_data(), end.mutable_data(), cause.mutable_data()};
    py::gil_scoped_release released;
    return std::make_unique<dpro::Delta>(in, out);
}

bool run(dpro::Delta& base, const Array<std::int32_t>& changed, const Array<std::int32_t>& resource,
         const Array<std::int64_t>& duration, const Array<std::int64_t>& gap, const Array<std::int32_t>& priority,
         const Array<std::int32_t>& removed, const Array<std::int32_t>& src, const Array<std::int32_t>& dst,
         std::int64_t limit) {
    const py::ssize_t given = resource.size();
    if (duration.size() != given || gap.size() != given || priority.size() != given || changed.size() > given ||
        src.size() != dst.size() || given >= std::numeric_limits<std::int32_t>::max() / 2) {
        throw std::invalid_argument("arrays of one edit must agree in length");
    }
    const dpro::DeltaEdit edit{static_cast<std::int32_t>(changed.size()),
                               static_cast<std::int32_t>(given - changed.size()),
                               static_cast<std::int32_t>(removed.size()), src.size(), changed.data(), resource.data(),
                               duration.data(), gap.data(), priority.data(), removed.data(), src.data(), dst.data()};
    py::gil_scoped_release released;
    return base.run(edit, limit);
}

py::tuple times(const dpro::Delta& base) {
    const auto& found = base.times();
    const auto count = static_cast<py::ssize_t>(found.size());
    Array<std::int64_t> start(count), end(count);
    Array<std::int32_t> op(count), cause(count);
    for (py::ssize_t i = 0; i < count; ++i) {
        op.mutable_at(i) = found[i].op;
        start.mutable_at(i) = found[i].start;
        end.mutable_at(i) = found[i].end;
        cause.mutable_at(i) = found[i].cause;
    }
    return py::make_tuple(op, start, end, cause);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "dpro's native core: the replay engine, list scheduling and the wire tracer.";
    // noconvert: a wrong dtype or layout is an error of the caller, never a silent copy.
    module.def("replay", &replay, py::arg("resource").noconvert(), py::arg("duration").noconvert(),
               py::arg("gap").noconvert(), py::arg("priority").noconvert(), py::arg("indptr").noconvert(),
               py::arg("indices").noconvert(), py::arg("resources"),
               "Start, end, cause [ops] of every op, makespan (ns), ops that ran, peak working bytes.");
    py::class_<dpro::Delta>(module, "Delta", "The schedule of a graph, ready for edits; each is taken back before the next.")
        .def(py::init(&delta), py::arg("resource").noconvert(), py::arg("duration").noconvert(), py::arg("gap").noconvert(),
             py::arg("priority").noconvert(), py::arg("indptr").noconvert(), py::arg("indices").noconvert(),
             py::arg("resources"), py::arg("start").noconvert(), py::arg("end").noconvert(),
             py::arg("cause").noconvert())
        .def("run", &run, py::arg("changed").noconvert(), py::arg("resource").noconvert(), py::arg("duration").noconvert(),
             py::arg("gap").noconvert(), py::arg("priority").noconvert(), py::arg("removed").noconvert(),
             py::arg("src").noconvert(), py::arg("dst").noconvert(), py::arg("limit"),
             "Whether the edited schedule could be told from the base's.")
        .def("times", &times, "Rows that may differ from the base, with start, end and cause of each.")
        .def_property_readonly("makespan", &dpro::Delta::makespan)
        .def_property_readonly("looked_at", &dpro::Delta::looked_at);
    bind_schedule(module);
    bind_wire(module);
}
