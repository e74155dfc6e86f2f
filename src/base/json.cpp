#include "base/json.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace rocket {

namespace {

constexpr int kMaxDepth = 64;
constexpr int64_t kMaxValues = int64_t{1} << 24;
constexpr size_t kFewItems = 12;  // objects up to this size are searched item by item

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Length of the well-formed UTF-8 sequence at the front of `text`, or 0: overlong forms, surrogates and code
// points above U+10FFFF are malformed.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0u; };
  const auto tail = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const uint32_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return tail(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    if (!tail(1) || !tail(2)) return 0;
    if (first == 0xE0 && byte(1) < 0xA0) return 0;
    if (first == 0xED && byte(1) >= 0xA0) return 0;
    return 3;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if (!tail(1) || !tail(2) || !tail(3)) return 0;
    if (first == 0xF0 && byte(1) < 0x90) return 0;
    if (first == 0xF4 && byte(1) >= 0x90) return 0;
    return 4;
  }
  return 0;
}

void append_utf8(uint32_t code, std::string& out) {
  const auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3F));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

}  // namespace

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Json document() {
    Json value = parse_value(0);
    skip_space();
    if (at_ < text_.size()) fail("expected the end of the text, found " + found());
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw JsonError(what, at_); }

  std::string found() const {
    if (at_ >= text_.size()) return "the end of the text";
    const size_t length = std::max<size_t>(1, utf8_length(text_.substr(at_)));
    return json_quote(text_.substr(at_, length));
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void skip_space() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return;
      ++at_;
    }
  }

  void literal(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) fail("expected a value, found " + found());
    at_ += word.size();
  }

  Json parse_value(int depth) {
    skip_space();
    if (++values_ > kMaxValues) fail("more than " + std::to_string(kMaxValues) + " values");
    Json value;
    switch (peek()) {
      case '{':
        parse_object(depth, value);
        break;
      case '[':
        parse_array(depth, value);
        break;
      case '"':
        value.value_ = parse_string();
        break;
      case 't':
        literal("true");
        value.value_ = true;
        break;
      case 'f':
        literal("false");
        value.value_ = false;
        break;
      case 'n':
        literal("null");
        break;
      default:
        parse_number(value);
    }
    return value;
  }

  void descend(int depth) const {
    if (depth >= kMaxDepth) fail("nested deeper than " + std::to_string(kMaxDepth) + " levels");
  }

  void parse_array(int depth, Json& value) {
    descend(depth);
    Json::Array items;
    ++at_;
    skip_space();
    if (!take(']')) {
      do {
        items.push_back(parse_value(depth + 1));
        skip_space();
      } while (take(','));
      if (!take(']')) fail("expected ',' or ']' in an array, found " + found());
    }
    value.value_ = std::move(items);
  }

  void parse_object(int depth, Json& value) {
    descend(depth);
    auto members = std::make_shared<Json::Members>();
    std::vector<size_t> key_at;
    ++at_;
    skip_space();
    if (!take('}')) {
      do {
        skip_space();
        key_at.push_back(at_);
        if (peek() != '"') fail("expected a key in double quotes, found " + found());
        std::string key = parse_string();
        skip_space();
        if (!take(':')) fail("expected ':' after key " + json_quote(key) + ", found " + found());
        members->items.emplace_back(std::move(key), parse_value(depth + 1));
        skip_space();
      } while (take(','));
      if (!take('}')) fail("expected ',' or '}' in an object, found " + found());
    }
    refuse_duplicates(*members, key_at);
    value.value_ = std::shared_ptr<const Json::Members>(std::move(members));
  }

  // Sorting finds duplicates in n log n steps; the order is kept for look-ups where there are many items.
  void refuse_duplicates(Json::Members& members, const std::vector<size_t>& key_at) {
    const Json::Object& items = members.items;
    std::vector<uint32_t> order(items.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      const int sign = items[a].first.compare(items[b].first);
      return sign != 0 ? sign < 0 : a < b;
    });
    for (size_t i = 1; i < order.size(); ++i) {
      if (items[order[i - 1]].first != items[order[i]].first) continue;
      throw JsonError("duplicate key " + json_quote(items[order[i]].first), key_at[order[i]]);
    }
    if (items.size() > kFewItems) members.by_key = std::move(order);
  }

  std::string parse_string() {
    std::string out;
    ++at_;
    for (;;) {
      // A run of plain ASCII goes in one piece.
      const size_t begin = at_;
      while (at_ < text_.size()) {
        const uint8_t c = static_cast<uint8_t>(text_[at_]);
        if (c < 0x20 || c >= 0x80 || c == '"' || c == '\\') break;
        ++at_;
      }
      out.append(text_.substr(begin, at_ - begin));
      if (at_ >= text_.size()) fail("a string without its closing quote");
      if (take('"')) return out;
      if (take('\\')) {
        parse_escape(out);
        continue;
      }
      if (static_cast<uint8_t>(text_[at_]) < 0x20) fail("a control character in a string, found " + found());
      const size_t length = utf8_length(text_.substr(at_));
      if (length == 0) fail("malformed UTF-8 in a string, found " + found());
      out.append(text_.substr(at_, length));
      at_ += length;
    }
  }

  void parse_escape(std::string& out) {
    const char c = peek();
    switch (c) {
      case '"':
      case '\\':
      case '/':
        out.push_back(c);
        break;
      case 'b':
        out.push_back('\b');
        break;
      case 'f':
        out.push_back('\f');
        break;
      case 'n':
        out.push_back('\n');
        break;
      case 'r':
        out.push_back('\r');
        break;
      case 't':
        out.push_back('\t');
        break;
      case 'u':
        ++at_;
        append_utf8(parse_code_point(), out);
        return;
      default:
        fail("unknown escape in a string, found " + found());
    }
    ++at_;
  }

  uint32_t parse_code_point() {
    const uint32_t high = parse_hex4();
    if (high < 0xD800 || high > 0xDFFF) return high;
    if (high > 0xDBFF || !take('\\') || !take('u')) fail("a lone surrogate in a string");
    const uint32_t low = parse_hex4();
    if (low < 0xDC00 || low > 0xDFFF) fail("a lone surrogate in a string");
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }

  uint32_t parse_hex4() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      if (is_digit(c))
        code = code * 16 + static_cast<uint32_t>(c - '0');
      else if (c >= 'a' && c <= 'f')
        code = code * 16 + static_cast<uint32_t>(c - 'a' + 10);
      else if (c >= 'A' && c <= 'F')
        code = code * 16 + static_cast<uint32_t>(c - 'A' + 10);
      else
        fail("expected four hexadecimal digits after \\u, found " + found());
    }
    return code;
  }

  void digits() {
    if (!is_digit(peek())) fail("expected a digit, found " + found());
    while (is_digit(peek())) ++at_;
  }

  void parse_number(Json& value) {
    const size_t begin = at_;
    if (peek() != '-' && !is_digit(peek())) fail("expected a value, found " + found());
    bool whole = true;
    take('-');
    if (take('0')) {
      if (is_digit(peek())) fail("a number with a leading zero");
    } else {
      digits();
    }
    if (take('.')) {
      whole = false;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      whole = false;
      ++at_;
      if (!take('+')) take('-');
      digits();
    }
    const char* const first = text_.data() + begin;
    const char* const last = text_.data() + at_;
    if (whole && store_integer(first, last, value)) return;
    double number = 0;
    if (std::from_chars(first, last, number).ec != std::errc()) {
      throw JsonError("a number outside the range of a double", begin);
    }
    value.value_ = number;
  }

  static bool store_integer(const char* first, const char* last, Json& value) {
    int64_t number = 0;
    if (std::from_chars(first, last, number).ec == std::errc()) {
      value.value_ = number;
      return true;
    }
    uint64_t positive = 0;
    if (*first == '-' || std::from_chars(first, last, positive).ec != std::errc()) return false;
    value.value_ = positive;
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  int64_t values_ = 0;
};

Json Json::parse(std::string_view text) {
  return JsonParser(text).document();
}

bool Json::boolean() const {
  return is_bool() && std::get<bool>(value_);
}

std::optional<int64_t> Json::integer() const {
  if (kind() != Kind::kInt) return std::nullopt;
  return std::get<int64_t>(value_);
}

std::optional<uint64_t> Json::unsigned_integer() const {
  if (kind() == Kind::kUint) return std::get<uint64_t>(value_);
  if (kind() != Kind::kInt || std::get<int64_t>(value_) < 0) return std::nullopt;
  return static_cast<uint64_t>(std::get<int64_t>(value_));
}

double Json::number() const {
  switch (kind()) {
    case Kind::kInt:
      return static_cast<double>(std::get<int64_t>(value_));
    case Kind::kUint:
      return static_cast<double>(std::get<uint64_t>(value_));
    case Kind::kDouble:
      return std::get<double>(value_);
    default:
      return 0;
  }
}

const std::string& Json::string() const {
  static const std::string empty;
  return is_string() ? std::get<std::string>(value_) : empty;
}

const Json::Array& Json::array() const {
  static const Array empty;
  return is_array() ? std::get<Array>(value_) : empty;
}

const Json::Object& Json::object() const {
  static const Object empty;
  return is_object() ? std::get<std::shared_ptr<const Members>>(value_)->items : empty;
}

const Json* Json::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  const Members& members = *std::get<std::shared_ptr<const Members>>(value_);
  if (members.by_key.empty()) {
    for (const auto& [name, value] : members.items) {
      if (name == key) return &value;
    }
    return nullptr;
  }
  const auto less = [&](uint32_t item, std::string_view wanted) {
    return members.items[item].first < wanted;
  };
  const auto found = std::lower_bound(members.by_key.begin(), members.by_key.end(), key, less);
  if (found == members.by_key.end() || members.items[*found].first != key) return nullptr;
  return &members.items[*found].second;
}

const char* Json::kind_name() const {
  switch (kind()) {
    case Kind::kNull:
      return "null";
    case Kind::kBool:
      return "true or false";
    case Kind::kString:
      return "a string";
    case Kind::kArray:
      return "an array";
    case Kind::kObject:
      return "an object";
    default:
      return "a number";
  }
}

std::string json_quote(std::string_view text) {
  constexpr size_t kMaxBytes = 200;
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    if (i >= kMaxBytes) {
      out += "…";
      break;
    }
    const size_t length = utf8_length(text.substr(i));
    const uint8_t c = static_cast<uint8_t>(text[i]);
    // C1 controls and the line separators of Unicode break lines too.
    const std::string_view piece = text.substr(i, std::max<size_t>(1, length));
    const bool breaks = piece == "\xE2\x80\xA8" || piece == "\xE2\x80\xA9" ||
                        (c == 0xC2 && length == 2 && static_cast<uint8_t>(piece[1]) < 0xA0);
    if (length == 0 || c < 0x20 || c == 0x7F || breaks) {
      for (const char byte : piece) {
        char hex[8];
        std::snprintf(hex, sizeof hex, "\\x%02x", static_cast<unsigned>(static_cast<uint8_t>(byte)));
        out += hex;
      }
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += piece;
    }
    i += piece.size();
  }
  return out + "\"";
}

}  // namespace rocket
