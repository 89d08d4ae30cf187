// ELF: the dynamic section names the relocations, a relocation names the slot and the symbol.
#include "got.hpp"

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace dpro {

namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kJumpSlot = R_X86_64_JUMP_SLOT, kGlobDat = R_X86_64_GLOB_DAT;
#else
constexpr std::uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT, kGlobDat = R_AARCH64_GLOB_DAT;
#endif

struct Search {
    const std::vector<std::string>& libraries;
    const std::vector<std::string>& symbols;
    std::vector<Slot> found;
};

struct Dynamic {
    const ElfW(Sym) * symbols = nullptr;
    const char* strings = nullptr;
    const ElfW(Rela) * plt = nullptr;
    const ElfW(Rela) * rela = nullptr;
    std::size_t plt_bytes = 0, rela_bytes = 0;
};

Dynamic read_dynamic(const dl_phdr_info& info, const ElfW(Phdr) & header) {
    // glibc has made the addresses absolute, musl leaves them relative to the library
    const auto address = [&](const ElfW(Dyn) & entry) {
        return entry.d_un.d_ptr < info.dlpi_addr ? info.dlpi_addr + entry.d_un.d_ptr : entry.d_un.d_ptr;
    };
    Dynamic out;
    bool with_addend = true;
    for (auto* entry = reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + header.p_vaddr); entry->d_tag; ++entry) {
        switch (entry->d_tag) {
            case DT_SYMTAB: out.symbols = reinterpret_cast<const ElfW(Sym)*>(address(*entry)); break;
            case DT_STRTAB: out.strings = reinterpret_cast<const char*>(address(*entry)); break;
            case DT_JMPREL: out.plt = reinterpret_cast<const ElfW(Rela)*>(address(*entry)); break;
            case DT_PLTRELSZ: out.plt_bytes = entry->d_un.d_val; break;
            case DT_RELA: out.rela = reinterpret_cast<const ElfW(Rela)*>(address(*entry)); break;
            case DT_RELASZ: out.rela_bytes = entry->d_un.d_val; break;
            case DT_PLTREL: with_addend = entry->d_un.d_val == DT_RELA; break;
            default: break;
        }
    }
    if (!with_addend) out.plt = nullptr;
    return out;
}

void search_table(const ElfW(Rela) * table, std::size_t bytes, const Dynamic& dynamic, ElfW(Addr) base, Slot slot,
                  Search& search) {
    for (std::size_t k = 0; table && k < bytes / sizeof *table; ++k) {
        const auto type = static_cast<std::uint32_t>(ELF64_R_TYPE(table[k].r_info));
        if (type != kJumpSlot && type != kGlobDat) continue;
        const char* name = dynamic.strings + dynamic.symbols[ELF64_R_SYM(table[k].r_info)].st_name;
        const auto& wanted = search.symbols;
        if (std::none_of(wanted.begin(), wanted.end(), [&](const std::string& w) { return w == name; })) continue;
        slot.symbol = name;
        slot.at = reinterpret_cast<void**>(base + table[k].r_offset);
        search.found.push_back(slot);
    }
}

int look_at(dl_phdr_info* info, std::size_t, void* data) {
    auto& search = *static_cast<Search*>(data);
    const char* slash = std::strrchr(info->dlpi_name, '/');
    const std::string name = slash ? slash + 1 : info->dlpi_name;
    const auto& wanted = search.libraries;
    if (name.empty() || std::none_of(wanted.begin(), wanted.end(),
                                     [&](const std::string& w) { return name.find(w) != std::string::npos; })) {
        return 0;
    }
    Slot slot{info->dlpi_name, "", nullptr, UINTPTR_MAX, 0};
    const ElfW(Phdr)* dynamic_header = nullptr;
    for (int k = 0; k < info->dlpi_phnum; ++k) {
        const auto& header = info->dlpi_phdr[k];
        if (header.p_type == PT_DYNAMIC) dynamic_header = &header;
        if (header.p_type != PT_LOAD) continue;
        slot.low = std::min<std::uintptr_t>(slot.low, info->dlpi_addr + header.p_vaddr);
        slot.high = std::max<std::uintptr_t>(slot.high, info->dlpi_addr + header.p_vaddr + header.p_memsz);
    }
    if (!dynamic_header) return 0;
    const Dynamic dynamic = read_dynamic(*info, *dynamic_header);
    if (!dynamic.symbols || !dynamic.strings) return 0;
    search_table(dynamic.plt, dynamic.plt_bytes, dynamic, info->dlpi_addr, slot, search);
    search_table(dynamic.rela, dynamic.rela_bytes, dynamic, info->dlpi_addr, slot, search);
    return 0;
}

}  // namespace

std::string slots_unsupported() { return ""; }

std::vector<Slot> find_slots(const std::vector<std::string>& libraries, const std::vector<std::string>& symbols) {
    Search search{libraries, symbols, {}};
    dl_iterate_phdr(&look_at, &search);
    return std::move(search.found);
}

Memory::Memory() {
    std::FILE* maps = std::fopen("/proc/self/maps", "re");
    if (!maps) return;
    char line[4096];
    while (std::fgets(line, sizeof line, maps)) {
        unsigned long low = 0, high = 0;
        char rights[5] = "";
        if (std::sscanf(line, "%lx-%lx %4s", &low, &high, rights) != 3) continue;
        ranges_.push_back({low, high,
                           (rights[0] == 'r' ? PROT_READ : 0) | (rights[1] == 'w' ? PROT_WRITE : 0) |
                               (rights[2] == 'x' ? PROT_EXEC : 0)});
    }
    std::fclose(maps);
}

bool Memory::exchange(void** at, void* expected, void* desired) const {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    const auto range = std::find_if(ranges_.begin(), ranges_.end(),
                                    [&](const Range& r) { return r.low <= address && address < r.high; });
    if (range == ranges_.end()) return false;
    const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    auto* page = reinterpret_cast<void*>(address & ~(size - 1));
    const bool locked = !(range->protection & PROT_WRITE);  // full RELRO
    if (locked && mprotect(page, size, range->protection | PROT_WRITE)) return false;
    const bool done = __atomic_compare_exchange_n(at, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    if (locked) mprotect(page, size, range->protection);
    return done;
}

}  // namespace dpro

#else

namespace dpro {

std::string slots_unsupported() { return "the wire can be traced on Linux with x86-64 or aarch64 only"; }
std::vector<Slot> find_slots(const std::vector<std::string>&, const std::vector<std::string>&) { return {}; }
Memory::Memory() = default;
bool Memory::exchange(void**, void*, void*) const { return false; }

}  // namespace dpro

#endif
