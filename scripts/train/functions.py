# ruff: noqa: E501 -- tables and templates
"""Small Python functions with varied names, annotations, docstrings and examples.

Each entry of ``FUNCTIONS`` is (names, parameters with types, return type, descriptions, bodies, example calls). A body is
indented by four spaces; ``{f}`` stands for the function's name and ``{a}``, ``{b}`` … for its parameters.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from .facts import ASSISTANT, USER


class Function(NamedTuple):
    names: list[str]
    parameters: list[tuple[list[str], str]]
    returns: str
    descriptions: list[str]
    bodies: list[str]
    examples: list[str]


NUM = (["n", "number", "value", "n"], "int")
LST = (["items", "values", "numbers", "data"], "list[int]")
TXT = (["text", "string", "word", "s"], "str")
F = Function

FUNCTIONS = [
    F(
        ["fibonacci", "fib", "fibonacci"],
        [(["n"], "int")],
        "int",
        [
            "Return the nth Fibonacci number.",
            "Compute the Fibonacci number at index n.",
            "Return the n-th number of the Fibonacci sequence.",
        ],
        [
            "    if {a} < 2:\n        return {a}\n    return {f}({a} - 1) + {f}({a} - 2)\n",
            "    if {a} <= 1:\n        return {a}\n    return {f}({a} - 1) + {f}({a} - 2)\n",
            "    a, b = 0, 1\n    for _ in range({a}):\n        a, b = b, a + b\n    return a\n",
            '    if {a} < 0:\n        raise ValueError("n must not be negative")\n    a, b = 0, 1\n    for _ in range({a}):\n        a, b = b, a + b\n    return a\n',
        ],
        ["10", "7", "20"],
    ),
    F(
        ["factorial", "fact"],
        [(["n"], "int")],
        "int",
        ["Return the factorial of n.", "Compute n! for a non-negative integer n."],
        [
            "    if {a} <= 1:\n        return 1\n    return {a} * {f}({a} - 1)\n",
            "    if {a} == 0:\n        return 1\n    return {a} * {f}({a} - 1)\n",
            "    result = 1\n    for i in range(2, {a} + 1):\n        result *= i\n    return result\n",
        ],
        ["5", "10", "3"],
    ),
    F(
        ["gcd", "greatest_common_divisor"],
        [(["a", "x", "m"], "int"), (["b", "y", "n"], "int")],
        "int",
        ["Return the greatest common divisor of two integers.", "Euclid's algorithm."],
        [
            "    while {b}:\n        {a}, {b} = {b}, {a} % {b}\n    return {a}\n",
            "    if {b} == 0:\n        return {a}\n    return {f}({b}, {a} % {b})\n",
        ],
        ["12, 18", "100, 75"],
    ),
    F(
        ["lcm", "least_common_multiple"],
        [(["a", "x"], "int"), (["b", "y"], "int")],
        "int",
        ["Return the least common multiple of two integers."],
        ["    return {a} * {b} // math.gcd({a}, {b})\n"],
        ["4, 6", "3, 5"],
    ),
    F(
        ["is_prime", "prime"],
        [NUM],
        "bool",
        ["Return True if the number is prime.", "Check whether the argument is a prime number."],
        [
            "    if {a} < 2:\n        return False\n    for i in range(2, int({a} ** 0.5) + 1):\n        if {a} % i == 0:\n            return False\n    return True\n",
            "    if {a} < 2:\n        return False\n    i = 2\n    while i * i <= {a}:\n        if {a} % i == 0:\n            return False\n        i += 1\n    return True\n",
        ],
        ["7", "12", "97"],
    ),
    F(
        ["primes_up_to", "sieve", "primes"],
        [(["limit", "n"], "int")],
        "list[int]",
        ["Return all primes up to the limit.", "The sieve of Eratosthenes."],
        [
            "    flags = [True] * ({a} + 1)\n    flags[0:2] = [False, False]\n    for i in range(2, int({a} ** 0.5) + 1):\n        if flags[i]:\n            for j in range(i * i, {a} + 1, i):\n                flags[j] = False\n    return [i for i, flag in enumerate(flags) if flag]\n"
        ],
        ["30", "100"],
    ),
    F(
        ["is_even", "even"],
        [NUM],
        "bool",
        ["Return True if the number is even."],
        ["    return {a} % 2 == 0\n"],
        ["4", "7"],
    ),
    F(
        ["is_odd", "odd"],
        [NUM],
        "bool",
        ["Return True if the number is odd."],
        ["    return {a} % 2 == 1\n", "    return {a} % 2 != 0\n"],
        ["4", "7"],
    ),
    F(
        ["square"],
        [(["x", "n", "value"], "float")],
        "float",
        ["Return the square of the argument."],
        ["    return {a} * {a}\n", "    return {a} ** 2\n"],
        ["3", "1.5"],
    ),
    F(
        ["power", "pow_int"],
        [(["base", "x"], "int"), (["exponent", "n"], "int")],
        "int",
        ["Raise base to a non-negative integer power."],
        [
            "    result = 1\n    while {b} > 0:\n        if {b} % 2 == 1:\n            result *= {a}\n        {a} *= {a}\n        {b} //= 2\n    return result\n",
            "    result = 1\n    for _ in range({b}):\n        result *= {a}\n    return result\n",
        ],
        ["2, 10", "3, 4"],
    ),
    F(
        ["add", "plus", "add_numbers"],
        [(["a", "x"], "int"), (["b", "y"], "int")],
        "int",
        ["Return the sum of two numbers.", "Add two numbers."],
        ["    return {a} + {b}\n"],
        ["2, 3", "10, 5"],
    ),
    F(
        ["multiply", "product_of"],
        [(["a", "x"], "int"), (["b", "y"], "int")],
        "int",
        ["Return the product of two numbers."],
        ["    return {a} * {b}\n"],
        ["2, 3", "6, 7"],
    ),
    F(
        ["maximum", "largest", "find_max"],
        [LST],
        "int",
        ["Return the largest item of a non-empty list."],
        [
            "    best = {a}[0]\n    for item in {a}[1:]:\n        if item > best:\n            best = item\n    return best\n",
            "    return max({a})\n",
        ],
        ["[3, 9, 2]", "[1]"],
    ),
    F(
        ["minimum", "smallest", "find_min"],
        [LST],
        "int",
        ["Return the smallest item of a non-empty list."],
        [
            "    best = {a}[0]\n    for item in {a}[1:]:\n        if item < best:\n            best = item\n    return best\n",
            "    return min({a})\n",
        ],
        ["[3, 9, 2]", "[1, 4]"],
    ),
    F(
        ["total", "sum_list", "add_all"],
        [LST],
        "int",
        ["Return the sum of all items."],
        [
            "    result = 0\n    for item in {a}:\n        result += item\n    return result\n",
            "    return sum({a})\n",
        ],
        ["[1, 2, 3]", "[]"],
    ),
    F(
        ["mean", "average"],
        [LST],
        "float",
        ["Return the arithmetic mean of the values.", "Return the average of a list of numbers."],
        [
            "    if not {a}:\n        return 0.0\n    return sum({a}) / len({a})\n",
            "    return sum({a}) / len({a})\n",
        ],
        ["[1, 2, 3]", "[4, 8]"],
    ),
    F(
        ["median"],
        [LST],
        "float",
        ["Return the median of a list of numbers."],
        [
            "    ordered = sorted({a})\n    middle = len(ordered) // 2\n    if len(ordered) % 2 == 1:\n        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n"
        ],
        ["[3, 1, 2]", "[1, 2, 3, 4]"],
    ),
    F(
        ["reverse_string", "reverse", "reversed_text"],
        [TXT],
        "str",
        ["Return the text in reverse order."],
        [
            "    return {a}[::-1]\n",
            '    result = ""\n    for char in {a}:\n        result = char + result\n    return result\n',
            '    return "".join(reversed({a}))\n',
        ],
        ['"hello"', '"abc"'],
    ),
    F(
        ["is_palindrome", "palindrome"],
        [TXT],
        "bool",
        ["Return True if the text reads the same backwards.", "Check if a string is a palindrome."],
        [
            "    return {a} == {a}[::-1]\n",
            "    cleaned = [c.lower() for c in {a} if c.isalnum()]\n    return cleaned == cleaned[::-1]\n",
        ],
        ['"level"', '"hello"'],
    ),
    F(
        ["count_vowels", "vowels"],
        [TXT],
        "int",
        ["Count the vowels in the text."],
        [
            '    count = 0\n    for char in {a}:\n        if char.lower() in "aeiou":\n            count += 1\n    return count\n',
            '    return sum(1 for char in {a}.lower() if char in "aeiou")\n',
        ],
        ['"hello world"'],
    ),
    F(
        ["count_words", "word_counts", "word_count"],
        [TXT],
        "dict[str, int]",
        ["Count how often each word occurs."],
        [
            "    counts = {{}}\n    for word in {a}.split():\n        counts[word] = counts.get(word, 0) + 1\n    return counts\n"
        ],
        ['"the cat and the dog"'],
    ),
    F(
        ["count_characters", "letter_counts"],
        [TXT],
        "dict[str, int]",
        ["Count how often each character occurs."],
        [
            "    counts = {{}}\n    for char in {a}:\n        counts[char] = counts.get(char, 0) + 1\n    return counts\n"
        ],
        ['"banana"'],
    ),
    F(
        ["binary_search", "search"],
        [(["items", "values", "array"], "list[int]"), (["target", "key"], "int")],
        "int",
        ["Return the index of the target in a sorted list, or -1.", "Binary search in a sorted list."],
        [
            "    low = 0\n    high = len({a}) - 1\n    while low <= high:\n        middle = (low + high) // 2\n        if {a}[middle] == {b}:\n            return middle\n        if {a}[middle] < {b}:\n            low = middle + 1\n        else:\n            high = middle - 1\n    return -1\n"
        ],
        ["[1, 3, 5, 7], 5"],
    ),
    F(
        ["linear_search", "find", "index_of"],
        [(["items", "values"], "list[int]"), (["target", "wanted"], "int")],
        "int",
        ["Return the first index of the target, or -1."],
        [
            "    for index, item in enumerate({a}):\n        if item == {b}:\n            return index\n    return -1\n"
        ],
        ["[4, 2, 7], 7"],
    ),
    F(
        ["bubble_sort", "sort_list"],
        [LST],
        "list[int]",
        ["Sort the list in place and return it.", "Sort a list with the bubble sort algorithm."],
        [
            "    n = len({a})\n    for i in range(n):\n        for j in range(n - i - 1):\n            if {a}[j] > {a}[j + 1]:\n                {a}[j], {a}[j + 1] = {a}[j + 1], {a}[j]\n    return {a}\n"
        ],
        ["[3, 1, 2]"],
    ),
    F(
        ["insertion_sort"],
        [LST],
        "list[int]",
        ["Sort the list by inserting each item at its place."],
        [
            "    for i in range(1, len({a})):\n        current = {a}[i]\n        j = i - 1\n        while j >= 0 and {a}[j] > current:\n            {a}[j + 1] = {a}[j]\n            j -= 1\n        {a}[j + 1] = current\n    return {a}\n"
        ],
        ["[5, 2, 9]"],
    ),
    F(
        ["selection_sort"],
        [LST],
        "list[int]",
        ["Sort the list by selecting the smallest item again and again."],
        [
            "    for i in range(len({a})):\n        smallest = i\n        for j in range(i + 1, len({a})):\n            if {a}[j] < {a}[smallest]:\n                smallest = j\n        {a}[i], {a}[smallest] = {a}[smallest], {a}[i]\n    return {a}\n"
        ],
        ["[5, 2, 9]"],
    ),
    F(
        ["quick_sort", "quicksort"],
        [LST],
        "list[int]",
        ["Return a sorted copy of the list.", "Sort a list with quicksort."],
        [
            "    if len({a}) <= 1:\n        return {a}\n    pivot = {a}[0]\n    smaller = [x for x in {a}[1:] if x < pivot]\n    larger = [x for x in {a}[1:] if x >= pivot]\n    return {f}(smaller) + [pivot] + {f}(larger)\n"
        ],
        ["[3, 6, 1, 5]"],
    ),
    F(
        ["merge_sort"],
        [LST],
        "list[int]",
        ["Return a sorted copy of the list.", "Sort a list with merge sort."],
        [
            "    if len({a}) <= 1:\n        return {a}\n    middle = len({a}) // 2\n    left = {f}({a}[:middle])\n    right = {f}({a}[middle:])\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n            result.append(right[j])\n            j += 1\n    return result + left[i:] + right[j:]\n"
        ],
        ["[4, 1, 3]"],
    ),
    F(
        ["merge", "merge_sorted"],
        [(["left", "a"], "list[int]"), (["right", "b"], "list[int]")],
        "list[int]",
        ["Merge two sorted lists into one."],
        [
            "    result = []\n    i = j = 0\n    while i < len({a}) and j < len({b}):\n        if {a}[i] <= {b}[j]:\n            result.append({a}[i])\n            i += 1\n        else:\n            result.append({b}[j])\n            j += 1\n    result.extend({a}[i:])\n    result.extend({b}[j:])\n    return result\n"
        ],
        ["[1, 4], [2, 3]"],
    ),
    F(
        ["flatten", "flatten_list"],
        [(["nested", "lists"], "list[list[int]]")],
        "list[int]",
        ["Flatten a list of lists."],
        [
            "    return [item for inner in {a} for item in inner]\n",
            "    result = []\n    for inner in {a}:\n        result.extend(inner)\n    return result\n",
        ],
        ["[[1, 2], [3]]"],
    ),
    F(
        ["unique", "remove_duplicates", "dedupe"],
        [LST],
        "list[int]",
        ["Return the items without duplicates, in order.", "Remove duplicates from a list."],
        [
            "    seen = set()\n    result = []\n    for item in {a}:\n        if item not in seen:\n            seen.add(item)\n            result.append(item)\n    return result\n"
        ],
        ["[1, 2, 1, 3]"],
    ),
    F(
        ["chunks", "split_list"],
        [LST, (["size", "n"], "int")],
        "list[list[int]]",
        ["Split a list into chunks of the given size."],
        ["    return [{a}[i:i + {b}] for i in range(0, len({a}), {b})]\n"],
        ["[1, 2, 3, 4, 5], 2"],
    ),
    F(
        ["celsius_to_fahrenheit", "to_fahrenheit"],
        [(["celsius", "degrees"], "float")],
        "float",
        ["Convert degrees Celsius to degrees Fahrenheit."],
        ["    return {a} * 9 / 5 + 32\n"],
        ["100", "20"],
    ),
    F(
        ["fahrenheit_to_celsius", "to_celsius"],
        [(["fahrenheit", "degrees"], "float")],
        "float",
        ["Convert degrees Fahrenheit to degrees Celsius."],
        ["    return ({a} - 32) * 5 / 9\n"],
        ["212", "68"],
    ),
    F(
        ["hello", "greet", "greeting"],
        [(["name", "person"], "str")],
        "str",
        ["Return a greeting.", "Greet a person by name."],
        ['    return f"Hello, {{{a}}}!"\n', '    return "Hello, " + {a} + "!"\n'],
        ['"world"', '"Anna"'],
    ),
    F(
        ["clamp", "limit"],
        [(["value", "x"], "float"), (["low", "lower"], "float"), (["high", "upper"], "float")],
        "float",
        ["Return the value limited to the given range."],
        [
            "    return max({b}, min({a}, {c}))\n",
            "    if {a} < {b}:\n        return {b}\n    if {a} > {c}:\n        return {c}\n    return {a}\n",
        ],
        ["5, 0, 3"],
    ),
    F(
        ["sum_of_digits", "digit_sum"],
        [NUM],
        "int",
        ["Return the sum of the decimal digits."],
        [
            "    return sum(int(digit) for digit in str({a}))\n",
            "    total = 0\n    while {a} > 0:\n        total += {a} % 10\n        {a} //= 10\n    return total\n",
        ],
        ["123", "99"],
    ),
    F(
        ["to_binary", "binary"],
        [NUM],
        "str",
        ["Return the binary representation of a number."],
        [
            '    if {a} == 0:\n        return "0"\n    digits = []\n    while {a} > 0:\n        digits.append(str({a} % 2))\n        {a} //= 2\n    return "".join(reversed(digits))\n',
            "    return bin({a})[2:]\n",
        ],
        ["10", "255"],
    ),
    F(
        ["collatz", "collatz_steps"],
        [(["n"], "int")],
        "int",
        ["Count the steps of the Collatz sequence until it reaches 1."],
        [
            "    steps = 0\n    while {a} != 1:\n        if {a} % 2 == 0:\n            {a} //= 2\n        else:\n            {a} = 3 * {a} + 1\n        steps += 1\n    return steps\n"
        ],
        ["6", "27"],
    ),
    F(
        ["is_leap_year", "leap_year"],
        [(["year", "y"], "int")],
        "bool",
        ["Return True if the year is a leap year."],
        ["    return {a} % 4 == 0 and ({a} % 100 != 0 or {a} % 400 == 0)\n"],
        ["2000", "1900"],
    ),
    F(
        ["fizzbuzz", "fizz_buzz"],
        [(["n", "limit"], "int")],
        "None",
        ["Print the numbers from 1 to n in the game of fizz buzz."],
        [
            '    for i in range(1, {a} + 1):\n        if i % 15 == 0:\n            print("FizzBuzz")\n        elif i % 3 == 0:\n            print("Fizz")\n        elif i % 5 == 0:\n            print("Buzz")\n        else:\n            print(i)\n'
        ],
        ["15"],
    ),
    F(
        ["read_lines", "load_lines"],
        [(["path", "filename"], "str")],
        "list[str]",
        ["Read a file and return its lines without line ends."],
        [
            '    with open({a}, encoding="utf-8") as file:\n        return [line.rstrip("\\n") for line in file]\n'
        ],
        ['"notes.txt"'],
    ),
    F(
        ["write_lines", "save_lines"],
        [(["path", "filename"], "str"), (["lines", "rows"], "list[str]")],
        "None",
        ["Write the lines to a file."],
        [
            '    with open({a}, "w", encoding="utf-8") as file:\n        for line in {b}:\n            file.write(line + "\\n")\n'
        ],
        ['"notes.txt", ["a", "b"]'],
    ),
    F(
        ["read_json", "load_json"],
        [(["path", "filename"], "str")],
        "dict",
        ["Read a JSON file."],
        ['    with open({a}, encoding="utf-8") as file:\n        return json.load(file)\n'],
        ['"config.json"'],
    ),
    F(
        ["transpose"],
        [(["matrix", "rows"], "list[list[int]]")],
        "list[list[int]]",
        ["Swap the rows and columns of a matrix."],
        [
            "    return [list(row) for row in zip(*{a})]\n",
            "    return [[row[i] for row in {a}] for i in range(len({a}[0]))]\n",
        ],
        ["[[1, 2], [3, 4]]"],
    ),
    F(
        ["matrix_multiply", "matmul"],
        [(["a", "left"], "list[list[float]]"), (["b", "right"], "list[list[float]]")],
        "list[list[float]]",
        ["Multiply two matrices."],
        [
            "    result = []\n    for row in {a}:\n        result.append([sum(x * y for x, y in zip(row, column)) for column in zip(*{b})])\n    return result\n"
        ],
        ["[[1, 0], [0, 1]], [[2, 3], [4, 5]]"],
    ),
    F(
        ["dot_product", "dot"],
        [(["a", "x"], "list[float]"), (["b", "y"], "list[float]")],
        "float",
        ["Return the dot product of two vectors."],
        ["    return sum(x * y for x, y in zip({a}, {b}))\n"],
        ["[1, 2], [3, 4]"],
    ),
    F(
        ["distance", "euclidean_distance"],
        [(["p", "a"], "tuple[float, float]"), (["q", "b"], "tuple[float, float]")],
        "float",
        ["Return the distance between two points."],
        ["    return math.sqrt(({a}[0] - {b}[0]) ** 2 + ({a}[1] - {b}[1]) ** 2)\n"],
        ["(0, 0), (3, 4)"],
    ),
    F(
        ["hanoi", "towers_of_hanoi"],
        [(["n", "disks"], "int"), (["source"], "str"), (["target"], "str"), (["spare"], "str")],
        "None",
        ["Print the moves that solve the Towers of Hanoi."],
        [
            '    if {a} == 0:\n        return\n    {f}({a} - 1, {b}, {d}, {c})\n    print(f"Move disk {{{a}}} from {{{b}}} to {{{c}}}")\n    {f}({a} - 1, {d}, {c}, {b})\n'
        ],
        ['3, "A", "C", "B"'],
    ),
    F(
        ["permutations", "all_permutations"],
        [(["items", "values"], "list[int]")],
        "list[list[int]]",
        ["Return all permutations of the items."],
        [
            "    if len({a}) <= 1:\n        return [{a}]\n    result = []\n    for i, item in enumerate({a}):\n        rest = {a}[:i] + {a}[i + 1:]\n        for tail in {f}(rest):\n            result.append([item] + tail)\n    return result\n"
        ],
        ["[1, 2, 3]"],
    ),
    F(
        ["invert", "invert_dict"],
        [(["mapping", "table"], "dict[str, int]")],
        "dict[int, str]",
        ["Swap the keys and values of a dictionary."],
        ["    return {{value: key for key, value in {a}.items()}}\n"],
        ['{"a": 1}'],
    ),
    F(
        ["group_by_length", "by_length"],
        [(["words"], "list[str]")],
        "dict[int, list[str]]",
        ["Group words by their length."],
        [
            "    groups = {{}}\n    for word in {a}:\n        groups.setdefault(len(word), []).append(word)\n    return groups\n"
        ],
        ['["a", "bb", "cc"]'],
    ),
]


def _render(rng: random.Random, fn: Function, body: str | None = None) -> tuple[str, str, str]:
    """The source of one function, its name and one of its descriptions."""
    name = rng.choice(fn.names)
    names = [rng.choice(options) for options, _ in fn.parameters]
    if len(set(names)) < len(names):
        names = [options[0] for options, _ in fn.parameters]
    body = body or rng.choice(fn.bodies)
    typed = rng.random() < 0.35
    arguments = ", ".join(
        f"{n}: {kind}" if typed else n for n, (_, kind) in zip(names, fn.parameters, strict=True)
    )
    header = f"def {name}({arguments})" + (f" -> {fn.returns}" if typed else "") + ":\n"
    description = rng.choice(fn.descriptions)
    doc = ""
    if rng.random() < 0.5:
        quote = rng.choice(['"""', '"""', '"""', "'''"])
        doc = f"    {quote}{description}{quote}\n"
    fields = {"f": name} | dict(zip("abcd", names, strict=False))
    text = header + doc + body.format(**fields)
    if rng.random() < 0.15:
        text = f"# {description}\n" + text
    imports = [m for m in ("math", "json") if f"{m}." in text]
    if imports and rng.random() < 0.7:
        text = "".join(f"import {m}\n" for m in imports) + "\n\n" + text
    return text, name, description


def _with_example(rng: random.Random, fn: Function, text: str, name: str) -> str:
    shape = rng.random()
    call = f"{name}({rng.choice(fn.examples)})"
    if shape < 0.2:
        return f"{text}\n\nprint({call})\n"
    if shape < 0.35:
        return f'{text}\n\nif __name__ == "__main__":\n    print({call})\n'
    if shape < 0.45:
        return f"{text}\n\nresult = {call}\nprint(result)\n"
    return text


def function_documents(seed: int, count: int) -> Iterator[str]:
    """Python files of one to four small functions, and requests for a function in the form of the chat template."""
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.12:
            fn = rng.choice(FUNCTIONS)
            text, name, description = _render(rng, fn)
            what = description[0].lower() + description[1:].rstrip(".")
            ask = rng.choice(
                [
                    f"Write a Python function {name}.",
                    f"Write a function in Python: {what}.",
                    f"Please write {name} in Python.",
                ]
            )
            yield f"{USER}\n{ask}{ASSISTANT}\n```python\n{text}```"
            continue
        # The Fibonacci function is what people try first, so it comes more often than the others.
        chosen = rng.sample(FUNCTIONS, rng.choice([1, 1, 1, 2, 2, 3, 4]))
        if rng.random() < 0.06:
            chosen[0] = FUNCTIONS[0]
        parts = []
        for fn in chosen:
            text, name, _ = _render(rng, fn)
            parts.append(_with_example(rng, fn, text, name) if len(chosen) == 1 else text)
        yield "\n\n".join(parts)
