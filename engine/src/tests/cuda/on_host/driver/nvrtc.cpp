// The fake NVRTC: checks its input, and compiles kernels with the host's compiler and device.hpp.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>

#include "double.hpp"

// Values of nvrtcResult.
enum Status : int {
    OK = 0,
    NVRTC_INVALID_INPUT = 3,
    NVRTC_INVALID_PROGRAM = 4,
    NVRTC_INVALID_OPTION = 5,
    NVRTC_COMPILATION = 6,
    NVRTC_INTERNAL = 11,
};

struct Program {
    std::string source, name;
    std::vector<std::pair<std::string, std::string>> headers;
    std::string log, binary;
    bool is_compiled = false;
};

static std::mutex& lock() {
    static std::mutex all;
    return all;
}

static std::map<const void*, std::unique_ptr<Program>>& programs() {
    static auto* const all = new std::map<const void*, std::unique_ptr<Program>>;
    return *all;
}

static Program* find(const Judged& call, const void* handle) {
    const auto found = programs().find(handle);
    if (found != programs().end()) return found->second.get();
    call.breaks(0, "%p is no program (any more)", handle);
    return nullptr;
}

// The architectures of NVRTC 13.0.
static const std::vector<int> ARCHITECTURES = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

EXPORTED int nvrtcVersion(int* major, int* minor) {
    const Judged call{"nvrtcVersion"};
    if (const int code = double_called(call.name)) return code;
    if (major == nullptr || minor == nullptr) return call.breaks(NVRTC_INVALID_INPUT, "nowhere to put it");
    *major = 13;
    *minor = 0;
    return OK;
}

EXPORTED int nvrtcGetNumSupportedArchs(int* count) {
    if (const int code = double_called("nvrtcGetNumSupportedArchs")) return code;
    *count = int(ARCHITECTURES.size());
    return OK;
}

EXPORTED int nvrtcGetSupportedArchs(int* all) {
    if (const int code = double_called("nvrtcGetSupportedArchs")) return code;
    memcpy(all, ARCHITECTURES.data(), ARCHITECTURES.size() * sizeof ARCHITECTURES[0]);
    return OK;
}

EXPORTED const char* nvrtcGetErrorString(int code) {
    switch (code) {
        case OK: return "NVRTC_SUCCESS";
        case 1: return "NVRTC_ERROR_OUT_OF_MEMORY";
        case NVRTC_INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case NVRTC_INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
        case NVRTC_INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case NVRTC_COMPILATION: return "NVRTC_ERROR_COMPILATION";
        case NVRTC_INTERNAL: return "NVRTC_ERROR_INTERNAL_ERROR";
        default: return "NVRTC_ERROR unknown";
    }
}

EXPORTED int nvrtcCreateProgram(void** handle, const char* source, const char* name, int count, const char* const* headers,
                                const char* const* include_names) {
    const Judged call{"nvrtcCreateProgram"};
    if (const int code = double_called(call.name)) return code;
    if (handle == nullptr || source == nullptr) return call.breaks(NVRTC_INVALID_INPUT, "no source");
    if (count < 0 || (count > 0 && (headers == nullptr || include_names == nullptr)))
        return call.breaks(NVRTC_INVALID_INPUT, "%d headers", count);
    auto program = std::make_unique<Program>();
    program->source = source;
    program->name = name == nullptr || *name == '\0' ? "default_program" : name;
    for (int i = 0; i < count; ++i) program->headers.emplace_back(include_names[i], headers[i]);
    std::unique_lock<std::mutex> locked(lock());
    // No handle is used twice, so that the use of a destroyed program is detected.
    static uint64_t last = 0xc0de'0000'0000;
    *handle = (void*)(last += 16);
    double_exists("program", 1, false);
    programs()[*handle] = std::move(program);
    return OK;
}

EXPORTED int nvrtcDestroyProgram(void** handle) {
    const Judged call{"nvrtcDestroyProgram"};
    if (const int code = double_called(call.name)) return code;
    std::unique_lock<std::mutex> locked(lock());
    if (handle == nullptr || find(call, *handle) == nullptr) return NVRTC_INVALID_PROGRAM;
    programs().erase(*handle);
    double_exists("program", -1, false);
    *handle = nullptr;
    return OK;
}

// Checks an option against the lists in the user guide. They contain flags (alone, or with true or false), and
// options with a value.
static bool is_known(const std::string& name, const std::string* value) {
    static const std::set<std::string> alone = {"--device-debug",
                                                "-G",
                                                "--generate-line-info",
                                                "-lineinfo",
                                                "--extra-device-vectorization",
                                                "-extra-device-vectorization",
                                                "--disable-warnings",
                                                "-w",
                                                "--restrict",
                                                "-restrict",
                                                "--device-as-default-execution-space",
                                                "-default-device",
                                                "--device-int128",
                                                "-device-int128",
                                                "--display-error-number",
                                                "-err-no",
                                                "--no-display-error-number",
                                                "-no-err-no",
                                                "--minimal",
                                                "-minimal",
                                                "--no-source-include",
                                                "-no-source-include",
                                                "--dlink-time-opt",
                                                "-dlto",
                                                "--extensible-whole-program",
                                                "-ewp",
                                                "--ptxas-options",
                                                "-Xptxas"};
    static const std::set<std::string> yes_or_no = {"--use_fast_math",
                                                    "-use_fast_math",
                                                    "--ftz",
                                                    "-ftz",
                                                    "--prec-sqrt",
                                                    "-prec-sqrt",
                                                    "--prec-div",
                                                    "-prec-div",
                                                    "--fmad",
                                                    "-fmad",
                                                    "--relocatable-device-code",
                                                    "-rdc",
                                                    "--builtin-move-forward",
                                                    "-builtin-move-forward",
                                                    "--builtin-initializer-list",
                                                    "-builtin-initializer-list"};
    static const std::set<std::string> valued = {"--maxrregcount",  "-maxrregcount",        "--std",           "-std",
                                                 "--define-macro",  "--undefine-macro",     "--include-path",  "--pre-include",
                                                 "-include",        "--diag-error",         "--diag-suppress", "--diag-warn",
                                                 "--split-compile", "--ptxas-options",      "-Xptxas",         "--version-ident",
                                                 "--time",          "--fdevice-syntax-only"};
    if (value == nullptr)
        return alone.count(name) == 1 || name == "--use_fast_math" || name == "-use_fast_math" || name.rfind("-D", 0) == 0 ||
               name.rfind("-I", 0) == 0;
    return (yes_or_no.count(name) == 1 && (*value == "true" || *value == "false")) || (valued.count(name) == 1 && !value->empty());
}

struct Target {
    int architecture = 75;
    bool is_virtual = true, is_specific = false;
};

// Parses sm_90, sm_90a or compute_90.
static bool parse(const std::string& text, Target& target) {
    target.is_virtual = text.rfind("compute_", 0) == 0;
    if (!target.is_virtual && text.rfind("sm_", 0) != 0) return false;
    std::string number = text.substr(text.find('_') + 1);
    target.is_specific = !number.empty() && (number.back() == 'a' || number.back() == 'f');
    if (target.is_specific) number.pop_back();
    if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos) return false;
    target.architecture = atoi(number.c_str());
    for (int known : ARCHITECTURES) {
        if (known == target.architecture) return true;
    }
    return false;
}

static bool write_file(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    return bool(file.flush());
}

static std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// True if the source has a generic lambda. Versions before 13.2 take the functions that such a lambda calls for host
// functions.
static bool has_generic_lambda(const Program& program) {
    const auto has_one = [](const std::string& text) { return text.find("](auto") != std::string::npos; };
    if (has_one(program.source)) return true;
    for (const auto& [name, text] : program.headers) {
        if (has_one(text) && program.source.find("\"" + name + "\"") != std::string::npos) return true;
    }
    return false;
}

// Returns where the library of a source is kept, for kernels that run without the driver too. The name is an FNV-1a hash
// of the source; the headers have a part in the folder's name.
static std::string kept_library(const std::string& folder, const std::string& source) {
    uint64_t hash = 0xcbf2'9ce4'8422'2325;
    for (const char byte : source) hash = (hash ^ uint8_t(byte)) * 0x100'0000'01b3;
    char name[32];
    snprintf(name, sizeof name, "/%016llx-0.so", (unsigned long long)hash);
    return folder + name;
}

// Compiles a program with the host's compiler, and puts the library at `to`, which is in `kept`.
static int build(const Judged& call, Program& program, const std::string& kept, const std::string& to) {
    // The command of the compiler, with its options, device.hpp and device.o.
    const char* const compiler = getenv("GAPLESS_DOUBLE_COMPILER");
    if (compiler == nullptr) return call.breaks(NVRTC_INTERNAL, "it was not told of a compiler");
    std::string folder = kept + "/double-of-nvrtc-XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) return call.breaks(NVRTC_INTERNAL, "no folder %s", folder.c_str());
    bool is_written = write_file(folder + "/" + program.name, program.source);
    for (const auto& [name, text] : program.headers) is_written &= write_file(folder + "/" + name, text);
    const std::string command = std::string(compiler) + " -I '" + folder + "' '" + folder + "/" + program.name + "' -o '" +
                                folder + "/binary' 2> '" + folder + "/log'";
    const bool is_compiled = is_written && system(command.c_str()) == 0 && rename((folder + "/binary").c_str(), to.c_str()) == 0;
    program.log = read_file(folder + "/log");
    for (const auto& [name, text] : program.headers) unlink((folder + "/" + name).c_str());
    for (const std::string& name : {program.name, std::string("binary"), std::string("log")}) unlink((folder + "/" + name).c_str());
    rmdir(folder.c_str());
    return is_compiled ? OK : NVRTC_COMPILATION;
}

static int compile(const Judged& call, Program& program, const Target& target) {
    const char* const kept = getenv("GAPLESS_DOUBLE_KEPT");
    if (kept == nullptr) return call.breaks(NVRTC_INTERNAL, "it was not told of a folder");
    const std::string path = kept_library(kept, program.source);
    // Ranks often need the same kernel at the same time. One of them compiles it, and the others wait.
    const int turn = open((path + ".turn").c_str(), O_RDWR | O_CREAT, 0666);
    flock(turn, LOCK_EX);
    const int status = access(path.c_str(), R_OK) == 0 ? OK : build(call, program, kept, path);
    close(turn);
    if (status != OK) return status;
    const std::string library = read_file(path);
    Binary binary = {};
    memcpy(binary.magic, Binary::MAGIC, sizeof binary.magic);
    binary.architecture = unsigned(target.architecture);
    binary.is_specific = target.is_specific;
    binary.bytes = library.size();
    program.binary = std::string((const char*)&binary, sizeof binary) + library;
    return OK;
}

EXPORTED int nvrtcCompileProgram(void* handle, int count, const char* const* options) {
    const Judged call{"nvrtcCompileProgram"};
    const int code = double_called(call.name);
    if (count < 0 || (count > 0 && options == nullptr)) return call.breaks(NVRTC_INVALID_INPUT, "%d options", count);
    std::unique_lock<std::mutex> locked(lock());
    Program* const program = find(call, handle);
    if (program == nullptr) return NVRTC_INVALID_PROGRAM;
    program->is_compiled = true;
    if (code != 0) return code;
    // The lock is released, so that programs can be compiled in parallel.
    locked.unlock();
    Target target;
    bool is_device_default = false;
    for (int i = 0; i < count; ++i) {
        const std::string option = options[i];
        is_device_default |= option == "--device-as-default-execution-space" || option == "-default-device";
        const size_t equal = option.find('=');
        const std::string name = option.substr(0, equal), value = equal == std::string::npos ? "" : option.substr(equal + 1);
        const bool is_architecture = name == "--gpu-architecture" || name == "-arch";
        if (is_architecture ? parse(value, target) : is_known(name, equal == std::string::npos ? nullptr : &value)) continue;
        program->log = "nvrtc: error: invalid value or option: " + option + "\n";
        return call.breaks(NVRTC_INVALID_OPTION, "%s", option.c_str());
    }
    if (!is_device_default && has_generic_lambda(*program)) {
        program->log = "error: host functions are not allowed in JIT mode. Consider using -default-device flag\n";
        return call.breaks(NVRTC_COMPILATION, "%s has a generic lambda, which is a host's by default", program->name.c_str());
    }
    const int status = compile(call, *program, target);
    if (target.is_virtual) program->binary.clear();
    return status;
}

// Handles a query about a program.
template <typename Answer>
static int ask(const char* name, void* handle, Answer answer) {
    const Judged call{name};
    if (const int code = double_called(call.name)) return code;
    std::unique_lock<std::mutex> locked(lock());
    const Program* const program = find(call, handle);
    return program == nullptr ? NVRTC_INVALID_PROGRAM : answer(call, *program);
}

EXPORTED int nvrtcGetCUBINSize(void* handle, size_t* bytes) {
    return ask("nvrtcGetCUBINSize", handle, [&](const Judged& call, const Program& program) -> int {
        if (bytes == nullptr || !program.is_compiled) return call.breaks(NVRTC_INVALID_INPUT, "nothing was compiled");
        *bytes = program.binary.size();
        return OK;
    });
}

EXPORTED int nvrtcGetCUBIN(void* handle, char* to) {
    return ask("nvrtcGetCUBIN", handle, [&](const Judged& call, const Program& program) -> int {
        if (to == nullptr || program.binary.empty()) return call.breaks(NVRTC_INVALID_INPUT, "there is no machine code");
        memcpy(to, program.binary.data(), program.binary.size());
        return OK;
    });
}

EXPORTED int nvrtcGetProgramLogSize(void* handle, size_t* bytes) {
    return ask("nvrtcGetProgramLogSize", handle, [&](const Judged& call, const Program& program) -> int {
        if (bytes == nullptr || !program.is_compiled) return call.breaks(NVRTC_INVALID_INPUT, "nothing was compiled");
        *bytes = program.log.size() + 1;
        return OK;
    });
}

EXPORTED int nvrtcGetProgramLog(void* handle, char* to) {
    return ask("nvrtcGetProgramLog", handle, [&](const Judged& call, const Program& program) -> int {
        if (to == nullptr || !program.is_compiled) return call.breaks(NVRTC_INVALID_INPUT, "nothing was compiled");
        memcpy(to, program.log.c_str(), program.log.size() + 1);
        return OK;
    });
}
