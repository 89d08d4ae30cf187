#include <pybind11/pybind11.h>

PYBIND11_MODULE(_native, module) {
    module.doc() = "dpro's native core: the replay engine.";
}
