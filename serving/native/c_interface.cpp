// The functions of tierbed_serving.h, and a reader of the folder's records (docs/serving.md describes them).
#include "tierbed_serving.h"

#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "served_tables.h"

using namespace tierbed;
using namespace tierbed::serving;

struct tierbed_served {
    std::string folder, embedding;
    bool unknown_initial;
    u64 version;
    ServedTables tables;
};

namespace {

constexpr std::streamoff MAX_RECORD_BYTES = 1 << 24;

thread_local std::string last_error;

// Reads JSON as a publisher writes it: without spaces, and with fields in a fixed order.
class JsonReader {
public:
    JsonReader(std::string text, std::string name) : text_(std::move(text)), name_(std::move(name)) {}

    bool skip(const std::string& token) {
        if (text_.compare(position_, token.size(), token) != 0) return false;
        position_ += token.size();
        return true;
    }
    void expect(const std::string& token) {
        if (!skip(token)) throw std::runtime_error(name_ + ": no " + token + " at byte " + std::to_string(position_));
    }
    u64 read_number() {
        u64 number = 0;
        int digits = 0;
        for (; peek() >= '0' && peek() <= '9'; ++digits) number = number * 10 + (read() - '0');
        if (digits == 0 || digits > 18) throw std::runtime_error(name_ + ": it has an invalid number");
        return number;
    }
    std::string read_string() {
        expect("\"");
        std::string value;
        for (char c = read(); c != '"'; c = read()) value += c == '\\' ? read() : c;  // names have no control characters
        return value;
    }
    // Skips a value of any kind, which ends before a , or the end of an object or array that began before it.
    void skip_value() {
        for (int depth = 0; depth > 0 || !is_any(",}]");) {
            depth += is_any("{[") - is_any("}]");
            if (peek() == '"')
                read_string();
            else
                read();
        }
    }
    void skip_field(const std::string& name) {
        expect(",\"" + name + "\":");
        skip_value();
    }
    // Skips the rest of an object, with its }.
    void skip_fields() {
        while (skip(",")) {
            read_string();
            expect(":");
            skip_value();
        }
        expect("}");
    }

private:
    char peek() const {
        if (position_ >= text_.size()) throw std::runtime_error(name_ + ": it is truncated");
        return text_[position_];
    }
    char read() {
        const char c = peek();
        ++position_;
        return c;
    }
    bool is_any(std::string_view characters) const { return characters.find(peek()) != std::string_view::npos; }

    const std::string text_, name_;
    std::size_t position_ = 0;
};

// Opens a record, and reads its format.
JsonReader read_record(const std::string& path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const std::streamoff size = file ? static_cast<std::streamoff>(file.tellg()) : 0;
    if (size <= 0 || size > MAX_RECORD_BYTES)
        throw std::runtime_error("cannot read " + path + ": publish a version first");
    std::string data(static_cast<std::size_t>(size), '\0');
    if (!file.seekg(0).read(data.data(), size)) throw std::runtime_error("cannot read " + path);
    char checksum[16] = "";
    const std::string line = data.size() > 10 ? data.substr(9, data.size() - 10) : "";
    std::snprintf(checksum, sizeof checksum, "%08x\n", compute_crc32(line.data(), line.size()));
    if (data.compare(0, 9, checksum) != 0)
        throw std::runtime_error(path + ": it is damaged, its checksum does not match");
    JsonReader json(line, path);
    json.expect("{\"format\":");
    if (json.read_number() != 1) throw std::runtime_error(path + ": its format is of a later tierbed: upgrade tierbed");
    return json;
}

// Reads a table's file, or null. Returns its path, or "".
std::string read_file(JsonReader& json, const std::string& files) {
    if (json.skip("null")) return "";
    json.expect("{\"name\":");
    const std::string name = json.read_string();
    if (name.find('/') != std::string::npos) throw std::runtime_error(name + " is no file of the folder");
    json.skip_fields();
    return files + name;
}

std::string decode_hex(const std::string& text) {
    std::string bytes;
    const auto value = [](char c) { return c >= 'a' ? c - 'a' + 10 : c - '0'; };
    for (std::size_t i = 0; i + 1 < text.size(); i += 2)
        bytes += static_cast<char>(value(text[i]) << 4 | (value(text[i + 1]) & 15));
    return bytes;
}

u64 read_current(const std::string& folder) {
    JsonReader current = read_record(folder + "/CURRENT");
    current.expect(",\"version\":");
    return current.read_number();
}

tierbed_served* open_version(const std::string& folder, u64 version, const std::string& embedding,
                             bool unknown_initial, const ServedTables* previous) {
    char name[64];
    std::snprintf(name, sizeof name, "/versions/%06llu.json", static_cast<unsigned long long>(version));
    JsonReader json = read_record(folder + name);
    for (const char* field : {"version", "encoding", "step", "created", "tensors"}) json.skip_field(field);
    json.expect(",\"embeddings\":[");
    do {
        json.expect("{\"name\":");
        if (json.read_string() != embedding) {
            json.skip_fields();
            continue;
        }
        json.expect(",\"tables\":[");
        std::vector<TablePaths> paths;
        do {
            json.expect("{\"base\":");
            const std::string base = read_file(json, folder + "/files/");
            json.expect(",\"delta\":");
            paths.push_back({base, read_file(json, folder + "/files/")});
            json.skip_fields();
        } while (json.skip(","));
        json.expect("]");
        for (const char* field : {"snapshot", "description"}) json.skip_field(field);
        json.expect(",\"settings\":");
        return new tierbed_served{folder, embedding, unknown_initial, version,
                                  ServedTables(decode_hex(json.read_string()), paths, unknown_initial, previous)};
    } while (json.skip(","));
    throw std::runtime_error(folder + " has no embedding " + embedding);
}

tierbed_served* open_current(const std::string& folder, const std::string& embedding, bool unknown_initial,
                             const ServedTables* previous) {
    for (int attempts_left = 2;; --attempts_left) {
        const u64 version = read_current(folder);
        try {
            return open_version(folder, version, embedding, unknown_initial, previous);
        } catch (const std::runtime_error&) {  // if the publisher removed the version, CURRENT names another one
            if (attempts_left == 0 || read_current(folder) == version) throw;
        }
    }
}

// Checks everything that Python's callers check before they call `ServedTables::look_up`.
void look_up(const tierbed_served& served, const tierbed_lookup& arguments, void* out) {
    const ServedTables& tables = served.tables;
    const auto require = [](bool condition, const char* problem) {
        if (!condition) throw std::runtime_error(problem);
    };
    const bool is_pooled = arguments.pooling != TIERBED_NONE;
    require(arguments.pooling >= TIERBED_NONE && arguments.pooling <= TIERBED_MEAN, "pooling is unknown");
    require(arguments.dtype >= TIERBED_FLOAT32 && arguments.dtype <= TIERBED_BFLOAT16, "dtype is unknown");
    require(arguments.ids || arguments.num_ids == 0, "ids is NULL");
    require(is_pooled == (arguments.offsets != nullptr), "give offsets if rows are pooled, and only then");
    require(is_pooled || !arguments.weights, "weights are for rows that are pooled");
    const u64 num_bags = is_pooled ? arguments.num_bags : arguments.num_ids;
    for (u64 i = 0; is_pooled && i < num_bags; ++i)
        require(arguments.offsets[i] <= arguments.offsets[i + 1], "offsets must ascend");
    require(
        !is_pooled || (arguments.offsets[0] == 0 && static_cast<u64>(arguments.offsets[num_bags]) == arguments.num_ids),
        "offsets must ascend from 0 to num_ids");
    Bags bags;
    bags.offsets = arguments.offsets;
    const Lookup lookup{reinterpret_cast<const u64*>(arguments.ids),
                        arguments.table_ids,
                        num_bags,
                        bags,
                        is_pooled,
                        arguments.weights,
                        arguments.pooling == TIERBED_MEAN};
    const LookupCounts counts = tables.look_up(lookup, static_cast<FloatType>(arguments.dtype), out);
    if (counts.illegal_position != ~u64{0})
        throw std::runtime_error("id " + std::to_string(static_cast<i64>(counts.illegal_key)) + " is no id of table " +
                                 std::to_string(counts.illegal_table));
}

// Calls body. Returns its result, or `failure` after an exception.
template <class Result, class Body>
Result catch_errors(Result failure, const Body& body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {
        last_error = error.what();
    } catch (...) {
        last_error = "unknown error";
    }
    return failure;
}

}  // namespace

#define TIERBED_EXPORT extern "C" __attribute__((visibility("default")))

TIERBED_EXPORT tierbed_served* tierbed_serving_open(const char* folder, const char* embedding, int unknown_initial) {
    return catch_errors<tierbed_served*>(
        nullptr, [&] { return open_current(folder, embedding, unknown_initial != 0, nullptr); });
}

TIERBED_EXPORT tierbed_served* tierbed_serving_refresh(const tierbed_served* served) {
    return catch_errors<tierbed_served*>(nullptr, [&] {
        return open_current(served->folder, served->embedding, served->unknown_initial, &served->tables);
    });
}

TIERBED_EXPORT uint64_t tierbed_serving_version(const tierbed_served* served) { return served->version; }

TIERBED_EXPORT uint32_t tierbed_serving_dim(const tierbed_served* served) { return served->tables.dim(); }

TIERBED_EXPORT int tierbed_serving_lookup(const tierbed_served* served, const tierbed_lookup* lookup, void* out) {
    return catch_errors(-1, [&] {
        look_up(*served, *lookup, out);
        return 0;
    });
}

TIERBED_EXPORT void tierbed_serving_close(tierbed_served* served) { delete served; }

TIERBED_EXPORT const char* tierbed_serving_last_error(void) { return last_error.c_str(); }
