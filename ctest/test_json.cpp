// The JSON reader: what RFC 8259 allows, what it forbids, and that a hostile text costs no more than its
// length.
#include <chrono>

#include "base/json.h"
#include "check.h"

using rocket::Json;
using rocket::JsonError;

namespace {

void refused(const std::string& text, const std::string& part, size_t offset) {
  try {
    Json::parse(text);
    check::expect(false, "accepted: " + text);
  } catch (const JsonError& error) {
    const std::string message = error.what();
    check::expect(message.find(part) != std::string::npos,
                  text + ": expected \"" + part + "\" in: " + message);
    check::expect(message.find('\n') == std::string::npos, text + ": one line");
    check::expect(error.offset == offset, text + ": expected offset " + std::to_string(offset) + ", found " +
                                              std::to_string(error.offset));
  }
}

void values() {
  const Json json = Json::parse(
      " {\"a\": [1, -2, 3.5, 1e3, true, false, null], \"b\": {\"c\": \"x\"}, \"\": {}, \"e\": []}\r\n\t ");
  check::expect(json.is_object() && json.object().size() == 4, "object of four");
  const auto& a = json.find("a")->array();
  check::expect(a.size() == 7, "array of seven");
  check::expect(a[0].integer() == 1 && a[0].unsigned_integer() == 1u && a[0].number() == 1.0, "1");
  check::expect(a[1].integer() == -2 && !a[1].unsigned_integer(), "-2");
  check::expect(!a[2].is_integer() && !a[2].integer() && a[2].number() == 3.5, "3.5");
  check::expect(!a[3].is_integer() && a[3].number() == 1000.0, "1e3 is no integer");
  check::expect(a[4].is_bool() && a[4].boolean() && a[5].is_bool() && !a[5].boolean() && a[6].is_null(),
                "literals");
  check::expect(json.find("b")->find("c")->string() == "x", "nested");
  check::expect(json.find("")->is_object() && json.find("e")->is_array(), "empty key, empty containers");
  check::expect(json.find("absent") == nullptr && a[0].find("x") == nullptr, "find gives null");
  check::expect(json.object()[0].first == "a" && json.object()[3].first == "e", "file order");
  check::expect(Json::parse("0").integer() == 0 && Json::parse("-0").integer() == 0, "zero");
  check::expect(Json::parse("\"s\"").string() == "s", "a string alone");
}

void numbers() {
  check::expect(Json::parse("9223372036854775807").integer() == INT64_MAX, "largest int64");
  check::expect(Json::parse("-9223372036854775808").integer() == INT64_MIN, "smallest int64");
  const Json large = Json::parse("18446744073709551615");
  check::expect(large.is_integer() && !large.integer() && large.unsigned_integer() == UINT64_MAX,
                "largest uint64");
  const Json beyond = Json::parse("18446744073709551616");
  check::expect(!beyond.is_integer() && beyond.number() == 18446744073709551616.0, "2^64 is a double");
  check::expect(!Json::parse("-9223372036854775809").is_integer(), "below int64 is a double");
  check::expect(Json::parse("0.1").number() == 0.1 && Json::parse("1e-05").number() == 1e-05,
                "decimal fractions");
  check::expect(Json::parse("-1.5E+2").number() == -150.0, "exponent with sign");
  check::expect(Json::parse("4.9e-324").number() == 4.9e-324, "smallest subnormal");
  refused("1e999", "outside the range", 0);
  refused("[-1e999]", "outside the range", 1);
  refused("01", "leading zero", 1);
  refused("-", "expected a digit", 1);
  refused("1.", "expected a digit", 2);
  refused("1e", "expected a digit", 2);
  refused(".5", "expected a value", 0);
  refused("+1", "expected a value", 0);
  refused("NaN", "expected a value", 0);
  refused("Infinity", "expected a value", 0);
  refused("0x10", "expected the end", 1);
}

void strings() {
  check::expect(Json::parse(R"("\"\\\/\b\f\n\r\t")").string() == "\"\\/\b\f\n\r\t", "escapes");
  check::expect(Json::parse(R"("\u0041\u00e9\u20ac")").string() == "A\xC3\xA9\xE2\x82\xAC",
                "escaped code points");
  check::expect(Json::parse(R"("\ud83d\ude80")").string() == "\xF0\x9F\x9A\x80", "surrogate pair");
  check::expect(Json::parse(R"("\u0000")").string() == std::string(1, '\0'), "escaped NUL");
  check::expect(Json::parse("\"\xF0\x9F\x9A\x80 \xC3\xA9\"").string() == "\xF0\x9F\x9A\x80 \xC3\xA9",
                "raw UTF-8");
  refused(R"("\ud83d")", "lone surrogate", 7);
  refused(R"("\ude80")", "lone surrogate", 7);
  refused(R"("\ud83d\u0041")", "lone surrogate", 13);
  refused(R"("\x41")", "unknown escape", 2);
  refused(R"("\u12g4")", "hexadecimal", 5);
  refused("\"abc", "closing quote", 4);
  refused("\"a\nb\"", "control character", 2);
  refused("\"\xC0\xAF\"", "malformed UTF-8", 1);          // overlong
  refused("\"\xED\xA0\x80\"", "malformed UTF-8", 1);      // surrogate
  refused("\"\xF4\x90\x80\x80\"", "malformed UTF-8", 1);  // above U+10FFFF
  refused("\"a\xC3\"", "malformed UTF-8", 2);             // cut
  refused("\"\x80\"", "malformed UTF-8", 1);
}

void structure() {
  refused("", "expected a value", 0);
  refused("   ", "expected a value", 3);
  refused("{} x", "expected the end", 3);
  refused("[1 2]", "expected ',' or ']'", 3);
  refused("[1,]", "expected a value", 3);
  refused("[,1]", "expected a value", 1);
  refused("[1", "expected ',' or ']'", 2);
  refused("{\"a\":1,}", "expected a key", 7);
  refused("{a:1}", "expected a key", 1);
  refused("{\"a\" 1}", "expected ':'", 5);
  refused("{\"a\":1", "expected ',' or '}'", 6);
  refused("tru", "expected a value", 0);
  refused("nul", "expected a value", 0);
  refused("// c\n1", "expected a value", 0);
  refused("\xEF\xBB\xBF{}", "expected a value", 0);
  refused(std::string("[1\0]", 4), "expected ',' or ']'", 2);
  refused("{\"a\":1,\"b\":2,\"a\":3}", "duplicate key \"a\"", 13);
  refused("{\"a\":1,\"\\u0061\":3}", "duplicate key \"a\"", 7);
  refused("{\"x\":{\"__metadata__\":1,\"__metadata__\":1}}", "duplicate key", 23);
  check::expect(Json::parse(std::string(64, '[') + std::string(64, ']')).is_array(), "64 levels");
  refused(std::string(65, '[') + std::string(65, ']'), "nested deeper", 64);
  refused(std::string(1000000, '['), "nested deeper", 64);
}

void large() {
  const auto begin = std::chrono::steady_clock::now();
  constexpr int kKeys = 100000;
  std::string text = "{";
  // Descending, so that the order in the file is not the order of the index.
  for (int i = kKeys; i-- > 0;)
    text += (i + 1 < kKeys ? ",\"layers." : "\"layers.") + std::to_string(i) + "\":" + std::to_string(i);
  const Json json = Json::parse(text + "}");
  bool all = json.object().size() == kKeys && json.object()[0].second.integer() == kKeys - 1;
  for (int i = 0; i < kKeys; ++i) {
    const Json* const value = json.find("layers." + std::to_string(i));
    all = all && value != nullptr && value->integer() == i;
  }
  check::expect(all, "every key of a large object is found");
  check::expect(
      json.find("layers.") == nullptr && json.find("layers.100000") == nullptr && json.find("z") == nullptr,
      "absent keys of a large object");
  refused(text + ",\"layers.7\":0}", "duplicate key \"layers.7\"", text.size() + 1);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("      %d keys parsed twice and looked up in %.2f s\n", kKeys, seconds);
  check::expect(seconds < 20, "a large object takes linear time (quadratic is minutes)");

  std::string many = "[0";
  for (int i = 0; i < (1 << 24); ++i) many += ",0";
  try {
    Json::parse(many + "]");
    check::expect(false, "accepted 2^24 values");
  } catch (const JsonError& error) {
    check::expect(std::string(error.what()).find("more than 16777216 values") != std::string::npos,
                  error.what());
  }
}

void quoting() {
  check::expect(rocket::json_quote("a\"b\\c") == "\"a\\\"b\\\\c\"", "quotes and backslashes");
  check::expect(rocket::json_quote("a\nb\x1b[31m") == "\"a\\x0ab\\x1b[31m\"", "control characters");
  check::expect(rocket::json_quote("\xC2\x85\xE2\x80\xA8") == "\"\\xc2\\x85\\xe2\\x80\\xa8\"",
                "Unicode line breaks");
  check::expect(rocket::json_quote("\xFF\xC3\xA9") == "\"\\xff\xC3\xA9\"", "malformed bytes");
  check::expect(rocket::json_quote(std::string(5000, 'x')).size() < 220, "long text is cut");
}

}  // namespace

int main() {
  values();
  numbers();
  strings();
  structure();
  large();
  quoting();
  return check::finish("json");
}
