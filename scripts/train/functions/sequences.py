# ruff: noqa: E501 -- tables and templates
"""Functions of texts and of lists: searching, sorting, rearranging."""

from .kinds import LST, TXT, F

FUNCTIONS = [
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
]
