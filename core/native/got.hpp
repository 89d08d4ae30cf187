// Finds and changes the slots (global offset table entries) through which a loaded library calls a function.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dpro {

// Where one loaded library keeps the address of one function that it calls.
struct Slot {
    std::string library;  // full path
    std::string symbol;
    void** at;
    // The library's own addresses: a slot that points in here is not bound yet (lazy binding).
    std::uintptr_t low, high;
};

// "" where slots can be found and changed, else why not.
std::string slots_unsupported();

// Slots of `symbols` in loaded libraries whose file name contains one of `libraries`.
std::vector<Slot> find_slots(const std::vector<std::string>& libraries, const std::vector<std::string>& symbols);

// The protection of this process's memory at one moment, so that a page can be made writable and then put back.
class Memory {
  public:
    Memory();
    // Store `desired` if the slot holds `expected`. The page gets back the protection that it had.
    bool exchange(void** at, void* expected, void* desired) const;

  private:
    struct Range {
        std::uintptr_t low, high;
        int protection;
    };
    std::vector<Range> ranges_;
};

}  // namespace dpro
