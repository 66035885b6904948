#include "session.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <stdexcept>

namespace sekv_llama {

namespace {

struct header {
    char magic[8];
    uint32_t version;
    uint32_t n_vocab;
    uint64_t n_tokens;
    uint64_t state_bytes;
    uint64_t checksum;
};
static_assert(sizeof(header) == 40, "the file's layout has no padding");
static_assert(sizeof(llama_token) == 4 && sizeof(float) == 4, "the file's numbers have four bytes");

constexpr char magic[] = "SEKVSESS";
constexpr uint32_t version = 1;
constexpr size_t buffer_bytes = 1 << 20;

// FNV-1a: any single byte that changes changes it.
class checksum {
public:
    void add(const void * data, size_t size) {
        const unsigned char * bytes = static_cast<const unsigned char *>(data);
        for (size_t i = 0; i < size; i++) {
            value_ = (value_ ^ bytes[i]) * 0x100000001b3u;
        }
    }
    uint64_t value() const { return value_; }

private:
    uint64_t value_ = 0xcbf29ce484222325u;
};

uint64_t bytes_before_state(const header & head) {
    return sizeof head + head.n_tokens * sizeof(llama_token) + head.n_vocab * sizeof(float);
}

uint64_t own_checksum(const header & head, const llama_token * tokens, const float * logits) {
    checksum sum;
    sum.add(&head, offsetof(header, checksum));
    sum.add(tokens, head.n_tokens * sizeof *tokens);
    sum.add(logits, head.n_vocab * sizeof *logits);
    return sum.value();
}

struct close_file {
    void operator()(std::FILE * file) const { std::fclose(file); }
};
using open_file = std::unique_ptr<std::FILE, close_file>;

// A file beside its target, which takes the target's name when it is whole.
class draft {
public:
    explicit draft(const std::string & path) : path_(path), draft_path_(path + ".XXXXXX") {
        const int descriptor = mkstemp(draft_path_.data());
        if (descriptor < 0) {
            fail(std::strerror(errno));
        }
        file_.reset(fdopen(descriptor, "wb"));
        if (!file_) {
            const std::string reason = std::strerror(errno);
            close(descriptor);
            unlink(draft_path_.c_str());
            fail(reason);
        }
        std::setvbuf(file_.get(), nullptr, _IOFBF, buffer_bytes);
    }
    ~draft() {
        if (!draft_path_.empty()) {
            unlink(draft_path_.c_str());
        }
    }
    draft(const draft &) = delete;
    draft & operator=(const draft &) = delete;

    void write(const void * data, size_t size) { require(std::fwrite(data, 1, size, file_.get()) == size); }

    void write_at_start(const void * data, size_t size) {
        require(std::fseek(file_.get(), 0, SEEK_SET) == 0);
        write(data, size);
    }

    void publish() {
        require(std::fflush(file_.get()) == 0 && fsync(fileno(file_.get())) == 0);
        require(std::rename(draft_path_.c_str(), path_.c_str()) == 0);
        draft_path_.clear();
        // The name is as safe as the content.
        const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
        const int descriptor = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY);
        require(descriptor >= 0);
        const int synced = fsync(descriptor);
        close(descriptor);
        require(synced == 0);
    }

private:
    [[noreturn]] void fail(const std::string & reason) const {
        throw std::runtime_error("the session file " + path_ + " could not be written: " + reason);
    }

    void require(bool done) const {
        if (!done) {
            fail(std::strerror(errno));
        }
    }

    std::string path_;
    std::string draft_path_;  // empty: there is none to delete
    open_file file_;
};

[[noreturn]] void refuse(const std::string & path, const std::string & what) {
    throw std::runtime_error("the session file " + path + " " + what);
}

std::string hexadecimal(uint64_t number) {
    char text[17];
    std::snprintf(text, sizeof text, "%016" PRIx64, number);
    return text;
}

// Checks what the header says against the file's length before anything is allocated by it.
void check_header(const std::string & path, const header & head, uint64_t file_bytes) {
    if (std::memcmp(head.magic, magic, sizeof head.magic) != 0) {
        refuse(path, "is none: it begins with other bytes than " + std::string(magic));
    }
    if (head.version != version) {
        refuse(path, "has version " + std::to_string(head.version) + "; version " + std::to_string(version) + " was expected");
    }
    const uint64_t before_state = bytes_before_state(head);
    if (head.n_tokens > INT32_MAX || file_bytes < before_state || file_bytes - before_state != head.state_bytes) {
        refuse(path, "is cut short or damaged: it has " + std::to_string(file_bytes) + " bytes; " +
                     std::to_string(before_state + head.state_bytes) + " were expected");
    }
}

}  // namespace

uint64_t save_session(const std::string & path, const std::vector<llama_token> & tokens, const float * logits, engine & engine) {
    header head = {};
    std::memcpy(head.magic, magic, sizeof head.magic);
    head.version = version;
    head.n_vocab = static_cast<uint32_t>(engine.n_vocab());
    head.n_tokens = tokens.size();

    draft file(path);
    file.write(&head, sizeof head);
    file.write(tokens.data(), tokens.size() * sizeof(llama_token));
    file.write(logits, head.n_vocab * sizeof(float));
    // No exception may cross libsekv: the disk's waits here, and tells more than that a callback failed.
    std::exception_ptr problem;
    const state_writer write = [&](const void * data, size_t size) {
        try {
            file.write(data, size);
            head.state_bytes += size;
        } catch (const std::runtime_error &) {
            problem = std::current_exception();
        }
        return problem == nullptr;
    };
    try {
        engine.save_state(write);
    } catch (const std::runtime_error &) {
        if (problem != nullptr) {
            std::rethrow_exception(problem);
        }
        throw;
    }
    head.checksum = own_checksum(head, tokens.data(), logits);
    file.write_at_start(&head, sizeof head);
    file.publish();
    return bytes_before_state(head) + head.state_bytes;
}

session load_session(const std::string & path, engine & engine) {
    const open_file file(std::fopen(path.c_str(), "rb"));
    struct stat status;
    if (!file || fstat(fileno(file.get()), &status) != 0) {
        refuse(path, std::string("could not be read: ") + std::strerror(errno));
    }
    std::setvbuf(file.get(), nullptr, _IOFBF, buffer_bytes);
    const uint64_t file_bytes = static_cast<uint64_t>(status.st_size);
    if (!S_ISREG(status.st_mode) || file_bytes < sizeof(header)) {
        refuse(path, "is none: a file of at least " + std::to_string(sizeof(header)) + " bytes was expected");
    }
    const auto read = [&](void * data, size_t size) { return std::fread(data, 1, size, file.get()) == size; };
    const auto require = [&](bool done) {
        if (!done) {
            refuse(path, "could not be read to its end");
        }
    };

    header head;
    require(read(&head, sizeof head));
    check_header(path, head, file_bytes);
    session loaded;
    loaded.tokens.resize(head.n_tokens);
    loaded.logits.resize(head.n_vocab);
    require(read(loaded.tokens.data(), loaded.tokens.size() * sizeof(llama_token)));
    require(read(loaded.logits.data(), loaded.logits.size() * sizeof(float)));
    const uint64_t found = own_checksum(head, loaded.tokens.data(), loaded.logits.data());
    if (found != head.checksum) {
        refuse(path, "is damaged: its tokens and logits have the checksum " + hexadecimal(found) + "; " +
                     hexadecimal(head.checksum) + " was expected");
    }
    if (head.n_vocab != static_cast<uint32_t>(engine.n_vocab())) {
        refuse(path, "is of a model with " + std::to_string(head.n_vocab) + " tokens in its vocabulary; " +
                     std::to_string(engine.n_vocab()) + " were expected");
    }
    try {
        engine.load_state(read, loaded.logits.data());
    } catch (const std::runtime_error & problem) {
        refuse(path, std::string("could not be loaded: ") + problem.what());
    }
    // Each part is sound by itself: only a file that was put together from several gets here.
    if (engine.sekv()->last_pos(0) + 1 != static_cast<int64_t>(loaded.tokens.size()) || std::fgetc(file.get()) != EOF) {
        engine.truncate(0);
        refuse(path, "has a state that is not of its tokens");
    }
    return loaded;
}

}  // namespace sekv_llama
