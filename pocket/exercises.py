"""Small Python functions with what they do in words: exercises to write, complete and explain, all written here.

In: a seed. Out: exercises (name, parameters, sentence, body) made by combining conditions, operations and containers.
One in eight names is held out (by hash): `evaluate.py` runs what the model writes for those against the bodies here.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import cache

HELD_OUT_SHARE = 8
IN_SMALL_TALK = {"add", "factorial", "fibonacci", "is_prime"}  # answered there, so never held out


@dataclass(frozen=True)
class Exercise:
    """One function. does: a phrase after 'that' or 'Return ...' in the third person; samples: argument tuples to try."""

    name: str
    params: tuple[str, ...]
    does: str
    body: tuple[str, ...]
    samples: tuple[tuple, ...]
    imports: str = ""

    @property
    def signature(self) -> str:
        """`name(a, b)`."""
        return f"{self.name}({', '.join(self.params)})"

    @property
    def held_out(self) -> bool:
        """Whether it is kept for evaluation."""
        chosen = hashlib.blake2b(self.name.encode()).digest()[0] % HELD_OUT_SHARE == 0
        return chosen and self.name not in IN_SMALL_TALK

    @property
    def doc(self) -> str:
        """The sentence of a docstring: 'returns the sum' -> 'Return the sum.'"""
        first, _, rest = self.does.partition(" ")
        return f"{first.removesuffix('s').capitalize()} {rest}."

    def head(self, docstring: bool = True) -> str:
        """Imports, signature and docstring."""
        lines = [self.imports, "", ""] if self.imports else []
        lines.append(f"def {self.signature}:")
        return "\n".join([*lines, f'    """{self.doc}"""'] if docstring else lines)

    def code(self, docstring: bool = True) -> str:
        """The whole function."""
        return "\n".join([self.head(docstring), *("    " + line for line in self.body)])


NUMBERS = (([3, -2, 8, 0, 5],), ([1],), ([2, 4, 6, 7, 9, 12],))
ONE = ((0,), (1,), (7,), (12,), (-3,), (100,))
TEXTS = (("Hello World",), ("level",), ("a bc  def",))
WORDS = ((["apple", "fig", "banana"],), (["b", "a"],), (["one", "three", "Anna", "level"],))

# name part, phrase after "is", expression of {n}
CONDITIONS = (
    ("even", "even", "{n} % 2 == 0"), ("odd", "odd", "{n} % 2 == 1"), ("positive", "positive", "{n} > 0"),
    ("negative", "negative", "{n} < 0"), ("zero", "zero", "{n} == 0"), ("nonzero", "not zero", "{n} != 0"),
    ("nonnegative", "not negative", "{n} >= 0"), ("multiple_of_three", "a multiple of three", "{n} % 3 == 0"),
    ("multiple_of_five", "a multiple of five", "{n} % 5 == 0"), ("multiple_of_ten", "a multiple of ten", "{n} % 10 == 0"),
    ("greater_than_ten", "greater than ten", "{n} > 10"), ("less_than_ten", "less than ten", "{n} < 10"),
    ("small", "smaller than five", "{n} < 5"), ("large", "larger than one hundred", "{n} > 100"),
    ("one_digit", "a number of one digit", "0 <= {n} <= 9"), ("two_digit", "a number of two digits", "10 <= {n} <= 99"),
)  # fmt: skip
# name, phrase, expression of {x}, plural
OPERATIONS = (
    ("square", "{x} squared", "{x} * {x}", "squares"), ("cube", "{x} cubed", "{x} ** 3", "cubes"),
    ("double", "twice {x}", "2 * {x}", "doubles"), ("triple", "three times {x}", "3 * {x}", "triples"),
    ("half", "half of {x}", "{x} / 2", "halves"), ("negate", "the negative of {x}", "-{x}", "negatives"),
    ("increment", "{x} plus one", "{x} + 1", "successors"), ("decrement", "{x} minus one", "{x} - 1", "predecessors"),
    ("absolute", "the absolute value of {x}", "abs({x})", "absolute values"),
    ("fourth_power", "{x} to the power of four", "{x} ** 4", "fourth powers"),
    ("quarter", "a quarter of {x}", "{x} / 4", "quarters"), ("quadruple", "four times {x}", "4 * {x}", "quadruples"),
    ("last_digit", "the last digit of {x}", "abs({x}) % 10", "last digits"),
    ("add_ten", "{x} plus ten", "{x} + 10", "values plus ten"), ("times_ten", "ten times {x}", "10 * {x}", "tenfold values"),
    ("to_percent", "{x} as a percentage", "100 * {x}", "percentages"),
)  # fmt: skip
AGGREGATES = (
    ("sum", "the sum", "sum({c})"), ("largest", "the largest", "max({c})"), ("smallest", "the smallest", "min({c})"),
    ("number", "the number", "len({c})"),
)  # fmt: skip
LISTS = ("numbers", "values", "items")

TEXT_FUNCTIONS = (
    ("to_upper", "returns {t} in upper case", "{t}.upper()"), ("to_lower", "returns {t} in lower case", "{t}.lower()"),
    ("reverse_text", "returns {t} reversed", "{t}[::-1]"), ("reverse_string", "returns {t} backwards", "{t}[::-1]"),
    ("is_palindrome", "returns whether {t} is a palindrome", "{t} == {t}[::-1]"),
    ("count_words", "counts the words of {t}", "len({t}.split())"), ("first_word", "returns the first word of {t}", "{t}.split()[0]"),
    ("last_word", "returns the last word of {t}", "{t}.split()[-1]"), ("split_words", "splits {t} into words", "{t}.split()"),
    ("count_letters", "counts the letters of {t}", "sum(1 for c in {t} if c.isalpha())"),
    ("count_digits", "counts the digits in {t}", "sum(1 for c in {t} if c.isdigit())"),
    ("count_spaces", "counts the spaces in {t}", '{t}.count(" ")'), ("remove_spaces", "removes the spaces from {t}", '{t}.replace(" ", "")'),
    ("count_vowels", "counts the vowels in {t}", 'sum(1 for c in {t}.lower() if c in "aeiou")'),
    ("remove_vowels", "removes the vowels from {t}", '"".join(c for c in {t} if c.lower() not in "aeiou")'),
    ("first_letter", "returns the first character of {t}", "{t}[0]"), ("last_letter", "returns the last character of {t}", "{t}[-1]"),
    ("capitalize_words", "capitalizes each word of {t}", '" ".join(word.capitalize() for word in {t}.split())'),
    ("is_upper", "returns whether {t} is in upper case", "{t}.isupper()"), ("is_lower", "returns whether {t} is in lower case", "{t}.islower()"),
    ("is_empty", "returns whether {t} is empty", "not {t}"), ("is_blank", "returns whether {t} has only spaces", "not {t}.strip()"),
    ("is_numeric", "returns whether {t} consists of digits", "{t}.isdigit()"),
    ("word_lengths", "returns the length of each word of {t}", "[len(word) for word in {t}.split()]"),
    ("longest_word", "returns the longest word of {t}", "max({t}.split(), key=len)"),
    ("shortest_word", "returns the shortest word of {t}", "min({t}.split(), key=len)"),
    ("reverse_words", "reverses the order of the words of {t}", '" ".join({t}.split()[::-1])'),
    ("unique_letters", "returns the different characters of {t} in order", "sorted(set({t}))"),
    ("initials", "returns the initials of the words of {t}", '"".join(word[0] for word in {t}.split())'),
    ("double_text", "repeats {t} twice", "{t} * 2"), ("trim", "removes spaces around {t}", "{t}.strip()"),
    ("slugify", "turns {t} into words in lower case joined by hyphens", '"-".join({t}.lower().split())'),
    ("snake_case", "turns {t} into words in lower case joined by underscores", '"_".join({t}.lower().split())'),
    ("swap_case", "swaps upper and lower case in {t}", "{t}.swapcase()"), ("add_exclamation", "adds an exclamation mark to {t}", '{t} + "!"'),
    ("count_characters", "counts the characters of {t}", "len({t})"), ("middle_letter", "returns the middle character of {t}", "{t}[len({t}) // 2]"),
    ("sort_letters", "returns the characters of {t} in order", '"".join(sorted({t}))'),
    ("has_digits", "returns whether {t} contains a digit", "any(c.isdigit() for c in {t})"),
    ("has_spaces", "returns whether {t} contains a space", '" " in {t}'), ("count_lines_of_text", "counts the lines of {t}", "len({t}.splitlines())"),
)  # fmt: skip
WORD_FUNCTIONS = (
    ("longest", "returns the longest word", "max(words, key=len)"), ("shortest", "returns the shortest word", "min(words, key=len)"),
    ("sort_by_length", "sorts the words by length", "sorted(words, key=len)"), ("sort_words", "sorts the words", "sorted(words)"),
    ("sort_words_backwards", "sorts the words from z to a", "sorted(words, reverse=True)"),
    ("upper_words", "returns the words in upper case", "[word.upper() for word in words]"),
    ("lower_words", "returns the words in lower case", "[word.lower() for word in words]"),
    ("lengths", "returns the length of each word", "[len(word) for word in words]"),
    ("length_by_word", "returns a dictionary from each word to its length", "{word: len(word) for word in words}"),
    ("total_length", "returns the total length of the words", "sum(len(word) for word in words)"),
    ("join_words", "joins the words with spaces", '" ".join(words)'), ("join_with_commas", "joins the words with commas", '", ".join(words)'),
    ("join_lines", "joins the words with newlines", '"\\n".join(words)'), ("first_letters", "returns the first letter of each word", "[word[0] for word in words]"),
    ("last_letters", "returns the last letter of each word", "[word[-1] for word in words]"),
    ("palindromes", "returns the words that are palindromes", "[word for word in words if word == word[::-1]]"),
    ("long_words", "returns the words with more than four letters", "[word for word in words if len(word) > 4]"),
    ("short_words", "returns the words with at most four letters", "[word for word in words if len(word) <= 4]"),
    ("words_with_a", "returns the words that contain the letter a", '[word for word in words if "a" in word]'),
    ("capitalize_all", "returns the words capitalized", "[word.capitalize() for word in words]"),
    ("reverse_each", "returns each word reversed", "[word[::-1] for word in words]"),
    ("unique_words", "returns the different words in order", "sorted(set(words))"), ("count_unique_words", "counts the different words", "len(set(words))"),
)  # fmt: skip
N, AB = ONE, ((3, 4), (10, 2), (-1, 5), (7, 7))
PAIRS = (([1, 2, 3], [2, 3, 4]), ([5], [5]), ([1, 2], [8, 9]))
TABLES = (({"a": 1, "b": 3, "c": 2},), ({"x": 5},))
# name, parameters, what it does, body, samples
OTHERS: tuple[tuple, ...] = (
    ("add", "a b", "returns the sum of a and b", "return a + b", AB), ("subtract", "a b", "returns a minus b", "return a - b", AB),
    ("multiply", "a b", "returns the product of a and b", "return a * b", AB), ("divide", "a b", "returns a divided by b", "return a / b", AB),
    ("remainder", "a b", "returns the remainder of a divided by b", "return a % b", AB), ("power", "a b", "returns a to the power of b", "return a ** b", AB),
    ("average", "a b", "returns the average of a and b", "return (a + b) / 2", AB), ("difference", "a b", "returns the absolute difference of a and b", "return abs(a - b)", AB),
    ("maximum", "a b", "returns the larger of a and b", "return a if a > b else b", AB), ("minimum", "a b", "returns the smaller of a and b", "return a if a < b else b", AB),
    ("is_divisible", "a b", "returns whether a is divisible by b", "return a % b == 0", AB), ("are_equal", "a b", "returns whether a and b are equal", "return a == b", AB),
    ("swap", "a b", "returns b and a", "return b, a", AB), ("hypotenuse", "a b", "returns the hypotenuse of a right triangle with legs a and b", "return (a * a + b * b) ** 0.5", AB),
    ("rectangle_area", "width height", "returns the area of a rectangle", "return width * height", AB),
    ("rectangle_perimeter", "width height", "returns the perimeter of a rectangle", "return 2 * (width + height)", AB),
    ("triangle_area", "base height", "returns the area of a triangle", "return base * height / 2", AB),
    ("circle_area", "radius", "returns the area of a circle", "return math.pi * radius ** 2", N, "import math"),
    ("circumference", "radius", "returns the circumference of a circle", "return 2 * math.pi * radius", N, "import math"),
    ("sphere_volume", "radius", "returns the volume of a sphere", "return 4 / 3 * math.pi * radius ** 3", N, "import math"),
    ("square_area", "side", "returns the area of a square", "return side * side", N), ("cube_volume", "side", "returns the volume of a cube", "return side ** 3", N),
    ("celsius_to_fahrenheit", "celsius", "converts degrees Celsius to Fahrenheit", "return celsius * 9 / 5 + 32", N),
    ("fahrenheit_to_celsius", "fahrenheit", "converts degrees Fahrenheit to Celsius", "return (fahrenheit - 32) * 5 / 9", N),
    ("km_to_miles", "km", "converts kilometres to miles", "return km * 0.621371", N), ("minutes_to_seconds", "minutes", "converts minutes to seconds", "return minutes * 60", N),
    ("hours_to_minutes", "hours", "converts hours to minutes", "return hours * 60", N), ("hours_to_seconds", "hours", "converts hours to seconds", "return hours * 3600", N),
    ("seconds_to_minutes", "seconds", "converts seconds to minutes", "return seconds / 60", N), ("meters_to_kilometers", "meters", "converts metres to kilometres", "return meters / 1000", N),
    ("days_to_hours", "days", "converts days to hours", "return days * 24", N), ("weeks_to_days", "weeks", "converts weeks to days", "return weeks * 7", N),
    ("factorial", "n", "returns the factorial of n", "result = 1|for i in range(2, n + 1):|    result *= i|return result", ((0,), (1,), (5,))),
    ("fibonacci", "n", "returns the n-th Fibonacci number", "a, b = 0, 1|for _ in range(n):|    a, b = b, a + b|return a", ((0,), (1,), (10,))),
    ("fibonacci_list", "n", "returns the first n Fibonacci numbers", "result = []|a, b = 0, 1|for _ in range(n):|    result.append(a)|    a, b = b, a + b|return result", ((0,), (1,), (10,))),
    ("is_prime", "n", "returns whether n is a prime number", "if n < 2:|    return False|for i in range(2, int(n ** 0.5) + 1):|    if n % i == 0:|        return False|return True", N),
    ("gcd", "a b", "returns the greatest common divisor of a and b", "while b:|    a, b = b, a % b|return a", ((12, 18), (7, 3), (5, 0))),
    ("lcm", "a b", "returns the least common multiple of a and b", "return a * b // math.gcd(a, b)", ((12, 18), (7, 3)), "import math"),
    ("digit_sum", "n", "returns the sum of the digits of n", "return sum(int(digit) for digit in str(n))", ((0,), (123,), (99,))),
    ("count_digits_of", "n", "returns the number of digits of n", "return len(str(n))", ((0,), (123,))), ("reverse_number", "n", "returns n with its digits reversed", "return int(str(n)[::-1])", ((120,), (7,))),
    ("divisors", "n", "returns the divisors of n", "return [d for d in range(1, n + 1) if n % d == 0]", ((1,), (12,))),
    ("sum_to", "n", "returns the sum of the numbers from 1 to n", "return n * (n + 1) // 2", ((0,), (10,))), ("countdown", "n", "returns the numbers from n down to 1", "return list(range(n, 0, -1))", ((0,), (4,))),
    ("multiplication_table", "n", "returns the first ten multiples of n", "return [n * i for i in range(1, 11)]", N),
    ("sign", "x", "returns the sign of x as -1, 0 or 1", "if x > 0:|    return 1|if x < 0:|    return -1|return 0", N),
    ("clamp", "x low high", "limits x to the range from low to high", "return max(low, min(x, high))", ((5, 0, 3), (-1, 0, 3), (2, 0, 3))),
    ("is_between", "x low high", "returns whether x lies between low and high", "return low <= x <= high", ((5, 0, 3), (2, 0, 3))),
    ("is_leap_year", "year", "returns whether year is a leap year", "return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)", ((2000,), (1900,), (2024,), (2023,))),
    ("is_vowel", "letter", "returns whether letter is a vowel", 'return letter.lower() in "aeiou"', (("a",), ("x",))),
    ("greet", "name", "returns a greeting for name", 'return f"Hello, {name}!"', (("Ann",),)), ("say_goodbye", "name", "returns a farewell for name", 'return f"Goodbye, {name}!"', (("Ann",),)),
    ("full_name", "first last", "joins first and last name with a space", 'return f"{first} {last}"', (("Ann", "Lee"),)),
    ("repeat", "text count", "repeats text count times", "return text * count", (("ab", 3),)), ("count_letter", "text letter", "counts how often letter occurs in text", "return text.count(letter)", (("banana", "a"),)),
    ("remove_letter", "text letter", "removes letter from text", 'return text.replace(letter, "")', (("banana", "a"),)), ("contains", "text part", "returns whether text contains part", "return part in text", (("banana", "nan"), ("a", "b"))),
    ("replace_word", "text old new", "replaces old by new in text", "return text.replace(old, new)", (("a b a", "a", "c"),)), ("is_anagram", "a b", "returns whether a and b are anagrams", "return sorted(a) == sorted(b)", (("abc", "cab"), ("a", "b"))),
    ("starts_with", "text start", "returns whether text starts with start", "return text.startswith(start)", (("abc", "ab"), ("a", "b"))), ("ends_with", "text end", "returns whether text ends with end", "return text.endswith(end)", (("abc", "bc"), ("a", "b"))),
    ("words_longer_than", "words length", "returns the words that are longer than length", "return [word for word in words if len(word) > length]", ((["a", "abc"], 2),)),
    ("words_starting_with", "words letter", "returns the words that start with letter", "return [word for word in words if word.startswith(letter)]", ((["ab", "bc"], "a"),)),
    ("read_text", "path", "reads a text file", 'with open(path, encoding="utf-8") as f:|    return f.read()', ()), ("read_lines", "path", "returns the lines of a file", 'with open(path, encoding="utf-8") as f:|    return f.read().splitlines()', ()),
    ("count_lines", "path", "counts the lines of a file", 'with open(path, encoding="utf-8") as f:|    return sum(1 for line in f)', ()),
    ("count_words_in_file", "path", "counts the words of a file", 'with open(path, encoding="utf-8") as f:|    return len(f.read().split())', ()),
    ("first_line", "path", "returns the first line of a file", 'with open(path, encoding="utf-8") as f:|    return f.readline().rstrip()', ()),
    ("last_line", "path", "returns the last line of a file", 'with open(path, encoding="utf-8") as f:|    return f.read().splitlines()[-1]', ()),
    ("write_text", "path text", "writes text to a file", 'with open(path, "w", encoding="utf-8") as f:|    f.write(text)', ()),
    ("append_line", "path line", "appends a line to a file", 'with open(path, "a", encoding="utf-8") as f:|    f.write(line + "\\n")', ()),
    ("write_lines", "path lines", "writes lines to a file", 'with open(path, "w", encoding="utf-8") as f:|    for line in lines:|        f.write(line + "\\n")', ()),
    ("longest_line", "path", "returns the longest line of a file", 'with open(path, encoding="utf-8") as f:|    return max(f.read().splitlines(), key=len)', ()),
    ("file_size", "path", "returns the size of a file in bytes", "return os.path.getsize(path)", (), "import os"), ("file_exists", "path", "returns whether a file exists", "return os.path.exists(path)", (), "import os"),
    ("list_python_files", "folder", "lists the Python files of a folder", 'return sorted(Path(folder).glob("*.py"))', (), "from pathlib import Path"),
    ("load_json", "path", "reads a JSON file", 'with open(path, encoding="utf-8") as f:|    return json.load(f)', (), "import json"),
    ("save_json", "path value", "writes a value to a JSON file", 'with open(path, "w", encoding="utf-8") as f:|    json.dump(value, f)', (), "import json"),
    ("mean", "numbers", "returns the average of the numbers", "return sum(numbers) / len(numbers)", NUMBERS), ("median", "numbers", "returns the median of the numbers", "ordered = sorted(numbers)|middle = len(ordered) // 2|if len(ordered) % 2:|    return ordered[middle]|return (ordered[middle - 1] + ordered[middle]) / 2", NUMBERS),
    ("product", "numbers", "returns the product of the numbers", "result = 1|for n in numbers:|    result *= n|return result", NUMBERS), ("spread", "numbers", "returns the largest minus the smallest number", "return max(numbers) - min(numbers)", NUMBERS),
    ("running_total", "numbers", "returns the running totals of the numbers", "totals, total = [], 0|for n in numbers:|    total += n|    totals.append(total)|return totals", NUMBERS),
    ("variance", "numbers", "returns the variance of the numbers", "mean = sum(numbers) / len(numbers)|return sum((n - mean) ** 2 for n in numbers) / len(numbers)", NUMBERS),
    ("first", "items", "returns the first item", "return items[0]", NUMBERS), ("last", "items", "returns the last item", "return items[-1]", NUMBERS), ("reverse_list", "items", "returns the items in reverse order", "return items[::-1]", NUMBERS),
    ("remove_duplicates", "items", "removes duplicates from a list", "return list(dict.fromkeys(items))", (([1, 2, 1, 3],),)), ("has_duplicates", "items", "returns whether a list has duplicates", "return len(set(items)) < len(items)", (([1, 2, 1],), ([1, 2],))),
    ("sort_descending", "items", "sorts the items from large to small", "return sorted(items, reverse=True)", NUMBERS), ("is_sorted", "items", "returns whether the items are sorted", "return items == sorted(items)", NUMBERS), ("count_items", "items", "returns the number of items", "return len(items)", NUMBERS),
    ("take", "items n", "returns the first n items", "return items[:n]", (([1, 2, 3], 2),)), ("drop", "items n", "returns the items after the first n", "return items[n:]", (([1, 2, 3], 2),)), ("take_last", "items n", "returns the last n items", "return items[-n:]", (([1, 2, 3], 2),)),
    ("remove_item", "items item", "returns the items without item", "return [x for x in items if x != item]", (([1, 2, 1], 1),)), ("count_item", "items item", "counts how often item occurs", "return items.count(item)", (([1, 2, 1], 1),)), ("index_of", "items item", "returns the index of item", "return items.index(item)", (([1, 2, 1], 2),)),
    ("index_of_largest", "items", "returns the index of the largest item", "return items.index(max(items))", NUMBERS), ("second_largest", "numbers", "returns the second largest number", "return sorted(numbers)[-2]", (([3, 9, 5],),)), ("every_second", "items", "returns every second item", "return items[::2]", NUMBERS),
    ("flatten", "lists", "flattens a list of lists", "return [item for part in lists for item in part]", (([[1, 2], [3]],),)), ("chunks", "items size", "splits the items into chunks of the given size", "return [items[i : i + size] for i in range(0, len(items), size)]", (([1, 2, 3, 4, 5], 2),)),
    ("rotate", "items n", "moves the first n items to the end", "return items[n:] + items[:n]", (([1, 2, 3], 1),)), ("pairs", "items", "returns the pairs of neighbouring items", "return list(zip(items, items[1:]))", NUMBERS), ("zip_lists", "a b", "pairs the items of two lists", "return list(zip(a, b))", PAIRS),
    ("common", "a b", "returns the items that are in both lists", "return [item for item in a if item in b]", PAIRS), ("only_in_first", "a b", "returns the items of a that are not in b", "return [item for item in a if item not in b]", PAIRS), ("merge_lists", "a b", "joins two lists", "return a + b", PAIRS),
    ("dot_product", "a b", "returns the dot product of two lists", "return sum(x * y for x, y in zip(a, b))", PAIRS), ("add_lists", "a b", "adds two lists item by item", "return [x + y for x, y in zip(a, b)]", PAIRS), ("count_each", "items", "counts how often each item occurs", "counts = {}|for item in items:|    counts[item] = counts.get(item, 0) + 1|return counts", NUMBERS),
    ("group_by_length", "words", "groups words by their length", "groups = {}|for word in words:|    groups.setdefault(len(word), []).append(word)|return groups", WORDS), ("group_by_letter", "words", "groups words by their first letter", "groups = {}|for word in words:|    groups.setdefault(word[0], []).append(word)|return groups", WORDS),
    ("invert", "table", "swaps keys and values of a dictionary", "return {value: key for key, value in table.items()}", TABLES), ("largest_key", "table", "returns the key with the largest value", "return max(table, key=table.get)", TABLES), ("smallest_key", "table", "returns the key with the smallest value", "return min(table, key=table.get)", TABLES),
    ("sum_values", "table", "returns the sum of the values of a dictionary", "return sum(table.values())", TABLES), ("sorted_keys", "table", "returns the keys of a dictionary in order", "return sorted(table)", TABLES), ("sort_by_value", "table", "returns the items of a dictionary sorted by value", "return sorted(table.items(), key=lambda item: item[1])", TABLES),
    ("merge_dicts", "a b", "merges two dictionaries", "return {**a, **b}", (({"a": 1}, {"b": 2}),)), ("get_value", "table key default", "returns the value of key, or default", "return table.get(key, default)", (({"a": 1}, "a", 0), ({"a": 1}, "b", 0))), ("keys_above", "table limit", "returns the keys whose values are above limit", "return [key for key, value in table.items() if value > limit]", (({"a": 1, "b": 3}, 2),)),
)  # fmt: skip


def _on_numbers() -> list[Exercise]:
    """Conditions and operations alone and over lists."""
    out = []
    for name, phrase, expression in CONDITIONS:
        test = expression.format(n="n")
        out.append(Exercise(f"is_{name}", ("n",), f"returns whether n is {phrase}", (f"return {test}",), ONE))
        keep = f"[n for n in numbers if {test}]"
        those = f"the numbers that are {phrase}"
        out += [
            Exercise(f"keep_{name}", ("numbers",), f"returns {those}", (f"return {keep}",), NUMBERS),
            Exercise(f"remove_{name}", ("numbers",), f"removes {those}", (f"return [n for n in numbers if not ({test})]",), NUMBERS),
            Exercise(f"count_{name}", ("numbers",), f"counts {those}", (f"return sum(1 for n in numbers if {test})",), NUMBERS),
            Exercise(f"sum_of_{name}", ("numbers",), f"returns the sum of {those}", (f"return sum(n for n in numbers if {test})",), NUMBERS),
            Exercise(f"all_{name}", ("numbers",), f"returns whether all numbers are {phrase}", (f"return all({test} for n in numbers)",), NUMBERS),
            Exercise(f"any_{name}", ("numbers",), f"returns whether any number is {phrase}", (f"return any({test} for n in numbers)",), NUMBERS),
            Exercise(f"first_{name}", ("numbers",), f"returns the first number that is {phrase}, or None",
                     ("for n in numbers:", f"    if {test}:", "        return n", "return None"), NUMBERS),
        ]  # fmt: skip
    for name, phrase, expression, plural in OPERATIONS:
        out.append(Exercise(name, ("x",), f"returns {phrase.format(x='x')}", (f"return {expression.format(x='x')}",), ONE))
        each = expression.format(x="x")
        slug = plural.replace(" ", "_")
        out += [
            Exercise(slug, ("numbers",), f"returns the {plural} of the numbers", (f"return [{each} for x in numbers]",), NUMBERS),
            Exercise(f"sum_of_{slug}", ("numbers",), f"returns the sum of the {plural} of the numbers", (f"return sum({each} for x in numbers)",), NUMBERS),
            Exercise(f"largest_of_{slug}", ("numbers",), f"returns the largest of the {plural} of the numbers", (f"return max({each} for x in numbers)",), NUMBERS),
            Exercise(f"table_of_{slug}", ("numbers",), f"returns a dictionary from each number to {phrase.format(x='it')}",
                     (f"return {{x: {each} for x in numbers}}",), NUMBERS),
        ]  # fmt: skip
        for short, condition, test in CONDITIONS[:4]:
            out.append(Exercise(f"{slug}_of_{short}", ("numbers",), f"returns the {plural} of the numbers that are {condition}",
                                (f"return [{each} for x in numbers if {test.format(n='x')}]",), NUMBERS))  # fmt: skip
    return out


@cache
def exercises() -> tuple[Exercise, ...]:
    """All of them, each name once."""
    out = _on_numbers()
    out += [Exercise(n, ("text",), d.format(t="text"), (f"return {e.replace('{t}', 'text')}",), TEXTS) for n, d, e in TEXT_FUNCTIONS]
    out += [Exercise(n, ("words",), d, (f"return {e}",), WORDS) for n, d, e in WORD_FUNCTIONS]
    for name, params, does, body, samples, *imports in OTHERS:
        out.append(Exercise(name, tuple(params.split()), does, tuple(body.split("|")), samples, *imports))
    return tuple({e.name: e for e in out}.values())


ASK = (
    "Write a function `{sig}` that {does}.", "Write a Python function `{sig}` that {does}.", "Write `{sig}`: it {does}.",
    "I need a function `{name}` that {does}.", "Write a Python function that {does}. Call it `{name}`.",
    "Please write a function `{sig}` which {does}.", "Can you write a function called `{name}` that {does}?",
    "Implement `{sig}`. It {does}.", "Give me a Python function `{sig}` that {does}.", "{sig}: {doc} Write it in Python.",
)  # fmt: skip
COMPLETE = ("Complete this function:\n\n{head}", "{head}\n\nFinish this function.", "Write the body of this function:\n\n{head}",
            "Implement this:\n\n{head}", "Fill in the code for this signature and docstring:\n\n{head}")  # fmt: skip
EXPLAIN = ("What does this function do?\n\n{bare}", "Explain this function:\n\n{bare}", "{bare}\n\nWhat does this do?",
           "Explain this code:\n\n{bare}")  # fmt: skip
DOCUMENT = ("Write a docstring for this function:\n\n{bare}", "{bare}\n\nAdd a docstring.")
THOUGHTS = (
    "I need `{sig}`. It {does}.", "The function is called `{name}` and {does}.", "`{name}` takes {params} and {does}. I write it and show the code.",
    "The task: a function that {does}. One short function is enough.",
)  # fmt: skip


def fenced(code: str) -> str:
    """Code as a Markdown block."""
    return f"```python\n{code}\n```"


def conversation(rng: random.Random, e: Exercise) -> tuple[str, str, str]:
    """(question, answer, thought) about one exercise."""
    names = {"sig": e.signature, "name": e.name, "does": e.does, "doc": e.doc, "params": " and ".join(f"`{p}`" for p in e.params)}
    thought = rng.choice(THOUGHTS).format(**names)
    kind = rng.choices(("ask", "complete", "explain", "document"), (6, 2, 2, 0.5))[0]
    if kind == "explain":
        docstring = rng.random() < 0.2
        user = rng.choice(EXPLAIN).format(bare=fenced(e.code(docstring)))
        subject = rng.choice((f"`{e.name}`", "It", "This function", f"The function `{e.name}`"))
        return user, f"{subject} {e.does}.", f"The function is `{e.name}` and takes {names['params']}."
    if kind == "document":
        user = rng.choice(DOCUMENT).format(bare=fenced(e.code(False)))
        return user, fenced(e.code(True)), thought
    if kind == "complete":
        return rng.choice(COMPLETE).format(head=fenced(e.head())), fenced(e.code()), thought
    lead = rng.choice(("", "", "", f"Here is `{e.name}`:\n\n", "Here it is:\n\n"))
    return rng.choice(ASK).format(**names), lead + fenced(e.code(rng.random() < 0.7)), thought


def sample(rng: random.Random) -> Exercise:
    """One for training."""
    known = [e for e in exercises() if not e.held_out]
    return rng.choice(known)


def held_out() -> list[Exercise]:
    """Those for evaluation that can be run on samples."""
    return [e for e in exercises() if e.held_out and e.samples]
