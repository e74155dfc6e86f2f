# ruff: noqa: E501 -- tables and templates
"""Conversions, games, files, matrices, dictionaries."""

from .kinds import NUM, F

FUNCTIONS = [
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
