// Python's door to the native core: checks shapes, borrows the arrays, releases the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <stdexcept>

#include "replay.hpp"

namespace py = pybind11;

void bind_wire(py::module_& module);  // wire_module.cpp

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

py::tuple replay(const Array<std::int32_t>& resource, const Array<std::int64_t>& duration, const Array<std::int64_t>& gap,
                 const Array<std::int32_t>& priority, const Array<std::int64_t>& indptr,
                 const Array<std::int32_t>& indices, std::int32_t resources) {
    const py::ssize_t ops = resource.size();
    if (ops >= std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("too many ops");
    if (duration.size() != ops || gap.size() != ops || priority.size() != ops || indptr.size() != ops + 1 || resources < 0) {
        throw std::invalid_argument("arrays of one graph must agree in length");
    }
    Array<std::int64_t> start(ops), end(ops);
    Array<std::int32_t> cause(ops);
    const dpro::ReplayInput in{static_cast<std::int32_t>(ops), resources,       indices.size(),
                               resource.data(),                duration.data(), gap.data(),
                               priority.data(),                indptr.data(),   indices.data()};
    const dpro::ReplayOutput out{start.mutable_data(), end.mutable_data(), cause.mutable_data()};
    dpro::ReplaySummary summary{};
    {
        py::gil_scoped_release released;
        summary = dpro::replay(in, out);
    }
    return py::make_tuple(start, end, cause, summary.makespan, summary.done, summary.working_bytes);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "dpro's native core: the replay engine and the wire tracer.";
    // noconvert: a wrong dtype or layout is an error of the caller, never a silent copy.
    module.def("replay", &replay, py::arg("resource").noconvert(), py::arg("duration").noconvert(),
               py::arg("gap").noconvert(), py::arg("priority").noconvert(), py::arg("indptr").noconvert(),
               py::arg("indices").noconvert(), py::arg("resources"),
               "Start, end, cause [ops] of every op, makespan (ns), ops that ran, peak working bytes.");
    bind_wire(module);
}
