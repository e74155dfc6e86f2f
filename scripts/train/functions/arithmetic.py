# ruff: noqa: E501 -- tables and templates
"""Functions of numbers, and of lists of numbers that sum them up."""

from .kinds import LST, NUM, F

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
]
