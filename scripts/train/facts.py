# ruff: noqa: E501 -- tables and templates
"""Sentences generated from tables of facts, and the same facts as questions and answers.

A small model learns a fact only if it meets it often and in many wordings, so every table has many templates and every
document draws its own order, wording and selection.
"""

import random
from collections.abc import Iterator

# name, capital, continent, demonym or language, currency
COUNTRIES = """
Afghanistan|Kabul|Asia|Pashto|afghani
Albania|Tirana|Europe|Albanian|lek
Algeria|Algiers|Africa|Arabic|dinar
Andorra|Andorra la Vella|Europe|Catalan|euro
Angola|Luanda|Africa|Portuguese|kwanza
Argentina|Buenos Aires|South America|Spanish|peso
Armenia|Yerevan|Asia|Armenian|dram
Australia|Canberra|Oceania|English|dollar
Austria|Vienna|Europe|German|euro
Azerbaijan|Baku|Asia|Azerbaijani|manat
Bahrain|Manama|Asia|Arabic|dinar
Bangladesh|Dhaka|Asia|Bengali|taka
Barbados|Bridgetown|North America|English|dollar
Belarus|Minsk|Europe|Belarusian|ruble
Belgium|Brussels|Europe|Dutch|euro
Belize|Belmopan|North America|English|dollar
Bhutan|Thimphu|Asia|Dzongkha|ngultrum
Botswana|Gaborone|Africa|English|pula
Brazil|Brasilia|South America|Portuguese|real
Bulgaria|Sofia|Europe|Bulgarian|lev
Burkina Faso|Ouagadougou|Africa|French|franc
Cambodia|Phnom Penh|Asia|Khmer|riel
Cameroon|Yaounde|Africa|French|franc
Canada|Ottawa|North America|English|dollar
Chad|N'Djamena|Africa|French|franc
Chile|Santiago|South America|Spanish|peso
China|Beijing|Asia|Chinese|yuan
Colombia|Bogota|South America|Spanish|peso
Costa Rica|San Jose|North America|Spanish|colon
Croatia|Zagreb|Europe|Croatian|euro
Cuba|Havana|North America|Spanish|peso
Cyprus|Nicosia|Europe|Greek|euro
Denmark|Copenhagen|Europe|Danish|krone
Djibouti|Djibouti|Africa|French|franc
Ecuador|Quito|South America|Spanish|dollar
Egypt|Cairo|Africa|Arabic|pound
El Salvador|San Salvador|North America|Spanish|dollar
Eritrea|Asmara|Africa|Tigrinya|nakfa
Estonia|Tallinn|Europe|Estonian|euro
Ethiopia|Addis Ababa|Africa|Amharic|birr
Fiji|Suva|Oceania|English|dollar
Finland|Helsinki|Europe|Finnish|euro
France|Paris|Europe|French|euro
Gabon|Libreville|Africa|French|franc
Georgia|Tbilisi|Asia|Georgian|lari
Germany|Berlin|Europe|German|euro
Ghana|Accra|Africa|English|cedi
Greece|Athens|Europe|Greek|euro
Guatemala|Guatemala City|North America|Spanish|quetzal
Guinea|Conakry|Africa|French|franc
Guyana|Georgetown|South America|English|dollar
Haiti|Port-au-Prince|North America|French|gourde
Honduras|Tegucigalpa|North America|Spanish|lempira
Hungary|Budapest|Europe|Hungarian|forint
Iceland|Reykjavik|Europe|Icelandic|krona
India|New Delhi|Asia|Hindi|rupee
Indonesia|Jakarta|Asia|Indonesian|rupiah
Iran|Tehran|Asia|Persian|rial
Iraq|Baghdad|Asia|Arabic|dinar
Ireland|Dublin|Europe|English|euro
Italy|Rome|Europe|Italian|euro
Jamaica|Kingston|North America|English|dollar
Japan|Tokyo|Asia|Japanese|yen
Jordan|Amman|Asia|Arabic|dinar
Kazakhstan|Astana|Asia|Kazakh|tenge
Kenya|Nairobi|Africa|Swahili|shilling
Kuwait|Kuwait City|Asia|Arabic|dinar
Kyrgyzstan|Bishkek|Asia|Kyrgyz|som
Laos|Vientiane|Asia|Lao|kip
Latvia|Riga|Europe|Latvian|euro
Lebanon|Beirut|Asia|Arabic|pound
Liberia|Monrovia|Africa|English|dollar
Libya|Tripoli|Africa|Arabic|dinar
Liechtenstein|Vaduz|Europe|German|franc
Lithuania|Vilnius|Europe|Lithuanian|euro
Luxembourg|Luxembourg|Europe|French|euro
Madagascar|Antananarivo|Africa|Malagasy|ariary
Malawi|Lilongwe|Africa|English|kwacha
Malaysia|Kuala Lumpur|Asia|Malay|ringgit
Mali|Bamako|Africa|French|franc
Malta|Valletta|Europe|Maltese|euro
Mauritania|Nouakchott|Africa|Arabic|ouguiya
Mexico|Mexico City|North America|Spanish|peso
Moldova|Chisinau|Europe|Romanian|leu
Monaco|Monaco|Europe|French|euro
Mongolia|Ulaanbaatar|Asia|Mongolian|tugrik
Montenegro|Podgorica|Europe|Montenegrin|euro
Morocco|Rabat|Africa|Arabic|dirham
Mozambique|Maputo|Africa|Portuguese|metical
Namibia|Windhoek|Africa|English|dollar
Nepal|Kathmandu|Asia|Nepali|rupee
New Zealand|Wellington|Oceania|English|dollar
Nicaragua|Managua|North America|Spanish|cordoba
Niger|Niamey|Africa|French|franc
Nigeria|Abuja|Africa|English|naira
North Korea|Pyongyang|Asia|Korean|won
Norway|Oslo|Europe|Norwegian|krone
Oman|Muscat|Asia|Arabic|rial
Pakistan|Islamabad|Asia|Urdu|rupee
Panama|Panama City|North America|Spanish|balboa
Papua New Guinea|Port Moresby|Oceania|English|kina
Paraguay|Asuncion|South America|Spanish|guarani
Peru|Lima|South America|Spanish|sol
the Philippines|Manila|Asia|Filipino|peso
Poland|Warsaw|Europe|Polish|zloty
Portugal|Lisbon|Europe|Portuguese|euro
Qatar|Doha|Asia|Arabic|riyal
Romania|Bucharest|Europe|Romanian|leu
Russia|Moscow|Europe|Russian|ruble
Rwanda|Kigali|Africa|Kinyarwanda|franc
Samoa|Apia|Oceania|Samoan|tala
Saudi Arabia|Riyadh|Asia|Arabic|riyal
Senegal|Dakar|Africa|French|franc
Serbia|Belgrade|Europe|Serbian|dinar
Sierra Leone|Freetown|Africa|English|leone
Singapore|Singapore|Asia|English|dollar
Slovakia|Bratislava|Europe|Slovak|euro
Slovenia|Ljubljana|Europe|Slovene|euro
Somalia|Mogadishu|Africa|Somali|shilling
South Korea|Seoul|Asia|Korean|won
Spain|Madrid|Europe|Spanish|euro
Sudan|Khartoum|Africa|Arabic|pound
Suriname|Paramaribo|South America|Dutch|dollar
Sweden|Stockholm|Europe|Swedish|krona
Switzerland|Bern|Europe|German|franc
Syria|Damascus|Asia|Arabic|pound
Taiwan|Taipei|Asia|Chinese|dollar
Tajikistan|Dushanbe|Asia|Tajik|somoni
Tanzania|Dodoma|Africa|Swahili|shilling
Thailand|Bangkok|Asia|Thai|baht
Togo|Lome|Africa|French|franc
Tunisia|Tunis|Africa|Arabic|dinar
Turkey|Ankara|Asia|Turkish|lira
Turkmenistan|Ashgabat|Asia|Turkmen|manat
Uganda|Kampala|Africa|English|shilling
Ukraine|Kyiv|Europe|Ukrainian|hryvnia
the United Arab Emirates|Abu Dhabi|Asia|Arabic|dirham
the United Kingdom|London|Europe|English|pound
the United States|Washington|North America|English|dollar
Uruguay|Montevideo|South America|Spanish|peso
Uzbekistan|Tashkent|Asia|Uzbek|som
Venezuela|Caracas|South America|Spanish|bolivar
Vietnam|Hanoi|Asia|Vietnamese|dong
Yemen|Sanaa|Asia|Arabic|rial
Zambia|Lusaka|Africa|English|kwacha
Zimbabwe|Harare|Africa|English|dollar
"""

ELEMENTS = (
    "hydrogen H helium He lithium Li beryllium Be boron B carbon C nitrogen N oxygen O fluorine F neon Ne sodium Na "
    "magnesium Mg aluminium Al silicon Si phosphorus P sulfur S chlorine Cl argon Ar potassium K calcium Ca scandium Sc "
    "titanium Ti vanadium V chromium Cr manganese Mn iron Fe cobalt Co nickel Ni copper Cu zinc Zn gallium Ga germanium Ge "
    "arsenic As selenium Se bromine Br krypton Kr rubidium Rb strontium Sr yttrium Y zirconium Zr niobium Nb molybdenum Mo "
    "technetium Tc ruthenium Ru rhodium Rh palladium Pd silver Ag cadmium Cd indium In tin Sn antimony Sb tellurium Te "
    "iodine I xenon Xe"
)

STATES = (
    "Alabama:Montgomery Alaska:Juneau Arizona:Phoenix Arkansas:Little_Rock California:Sacramento Colorado:Denver "
    "Connecticut:Hartford Delaware:Dover Florida:Tallahassee Georgia:Atlanta Hawaii:Honolulu Idaho:Boise "
    "Illinois:Springfield Indiana:Indianapolis Iowa:Des_Moines Kansas:Topeka Kentucky:Frankfort Louisiana:Baton_Rouge "
    "Maine:Augusta Maryland:Annapolis Massachusetts:Boston Michigan:Lansing Minnesota:Saint_Paul Mississippi:Jackson "
    "Missouri:Jefferson_City Montana:Helena Nebraska:Lincoln Nevada:Carson_City New_Hampshire:Concord New_Jersey:Trenton "
    "New_Mexico:Santa_Fe New_York:Albany North_Carolina:Raleigh North_Dakota:Bismarck Ohio:Columbus "
    "Oklahoma:Oklahoma_City Oregon:Salem Pennsylvania:Harrisburg Rhode_Island:Providence South_Carolina:Columbia "
    "South_Dakota:Pierre Tennessee:Nashville Texas:Austin Utah:Salt_Lake_City Vermont:Montpelier Virginia:Richmond "
    "Washington:Olympia West_Virginia:Charleston Wisconsin:Madison Wyoming:Cheyenne"
)

PLAIN = """
The Earth goes around the Sun once a year.
The Moon goes around the Earth about once a month.
Mercury is the planet closest to the Sun.
Venus is the second planet from the Sun.
The Earth is the third planet from the Sun.
Mars is the fourth planet from the Sun.
Jupiter is the largest planet of the solar system.
Saturn is known for its rings.
Uranus is the seventh planet from the Sun.
Neptune is the planet farthest from the Sun.
Water freezes at zero degrees Celsius.
Water boils at one hundred degrees Celsius at sea level.
A week has seven days.
A year has twelve months.
A day has twenty-four hours.
An hour has sixty minutes.
A minute has sixty seconds.
A triangle has three sides.
A square has four equal sides.
A hexagon has six sides.
A spider has eight legs.
An insect has six legs.
The whale is the largest animal in the sea.
The elephant is the largest animal on land.
The cheetah is the fastest animal on land.
The giraffe is the tallest animal.
Light travels faster than sound.
The Nile is a river in Africa.
The Amazon is a river in South America.
The Danube is a river in Europe.
The Mississippi is a river in North America.
Mount Everest is the highest mountain in the world.
The Pacific is the largest ocean.
The Sahara is a desert in Africa.
Monday is the first day of the week.
Monday comes before Tuesday.
Tuesday comes before Wednesday.
Wednesday comes before Thursday.
Thursday comes before Friday.
Friday comes before Saturday.
Saturday comes before Sunday.
January is the first month of the year.
December is the last month of the year.
The sun rises in the east and sets in the west.
Bees make honey.
Cows give milk.
Plants need light and water to grow.
Ice is frozen water.
The heart pumps blood through the body.
The opposite of hot is cold.
The opposite of big is small.
The opposite of up is down.
The opposite of left is right.
The opposite of day is night.
The opposite of true is false.
The opposite of open is closed.
Red, yellow and blue are colours.
Grass is green and the sky is blue.
"""

COUNTRY_TEMPLATES = {
    "capital": [
        "The capital of {c} is {k}.",
        "{k} is the capital of {c}.",
        "{K} is the capital city of {c}.",
        "The capital city of {c} is {k}.",
        "{C} has its capital in {k}.",
        "The government of {c} sits in {k}.",
        "In {c}, the capital is {k}.",
    ],
    "continent": [
        "{C} is a country in {n}.",
        "{C} lies in {n}.",
        "The country of {c0} is in {n}.",
        "{k} is a city in {n}.",
    ],
    "language": [
        "People in {c} speak {l}.",
        "The main language of {c} is {l}.",
        "Many people in {k} speak {l}.",
        "{l} is spoken in {c}.",
    ],
    "currency": [
        "The currency of {c} is the {m}.",
        "In {c}, people pay with the {m}.",
        "The {m} is the currency of {c}.",
    ],
    "visit": [
        "Visitors to {c} often start in {k}.",
        "The road from the airport leads to {k}, the capital of {c}.",
        "She was born in {k}, the capital of {c}, and still lives in {c}.",
        "He moved to {k} because he wanted to learn {l}.",
        "Every train in {c} seems to end in {k}.",
    ],
}

COUNTRY_QUESTIONS = [
    ("What is the capital of {c}?", ["The capital of {c} is {k}.", "{k}.", "It is {k}."]),
    ("Which city is the capital of {c}?", ["{k} is the capital of {c}.", "{k}."]),
    ("Tell me the capital of {c}.", ["The capital of {c} is {k}."]),
    ("Where is {c}?", ["{C} is a country in {n}.", "{C} lies in {n}."]),
    ("On which continent is {c}?", ["{C} is in {n}."]),
    (
        "What language do people speak in {c}?",
        ["People in {c} speak {l}.", "The main language of {c} is {l}."],
    ),
    ("What is the currency of {c}?", ["The currency of {c} is the {m}."]),
    ("Which country has the capital {k}?", ["{k} is the capital of {c}.", "{C}."]),
]

USER, ASSISTANT = "<|user|>", "<|assistant|>"


def _country_fields() -> list[dict[str, str]]:
    rows = []
    for line in COUNTRIES.strip().splitlines():
        c, k, n, lang, money = line.split("|")
        rows.append(
            {
                "c": c,
                "C": c[0].upper() + c[1:],
                "c0": c.removeprefix("the "),
                "k": k,
                "K": k,
                "n": n,
                "l": lang,
                "m": money,
            }
        )
    return rows


def _states() -> list[tuple[str, str]]:
    return [tuple(part.replace("_", " ").split(":")) for part in STATES.split()]  # type: ignore[misc]


def _elements() -> list[tuple[str, str, int]]:
    words = ELEMENTS.split()
    return [(words[i], words[i + 1], i // 2 + 1) for i in range(0, len(words), 2)]


def _country_paragraph(rng: random.Random, row: dict[str, str]) -> str:
    kinds = ["capital", *rng.sample(["continent", "language", "currency", "visit"], rng.randint(0, 4))]
    if rng.random() < 0.3:
        rng.shuffle(kinds)
    return " ".join(rng.choice(COUNTRY_TEMPLATES[kind]).format(**row) for kind in kinds)


def _element_sentence(rng: random.Random, item: tuple[str, str, int]) -> str:
    name, symbol, number = item
    return rng.choice(
        [
            f"The chemical symbol of {name} is {symbol}.",
            f"{name.capitalize()} has the symbol {symbol} and the atomic number {number}.",
            f"The atomic number of {name} is {number}.",
            f"{name.capitalize()} is the element with atomic number {number}.",
            f"The symbol {symbol} stands for {name}.",
        ]
    )


def _state_sentence(rng: random.Random, item: tuple[str, str]) -> str:
    state, capital = item
    return rng.choice(
        [
            f"The capital of the state of {state} is {capital}.",
            f"{capital} is the capital of {state}, a state of the United States.",
            f"{state} is one of the United States, and its capital is {capital}.",
        ]
    )


def fact_documents(seed: int, count: int) -> Iterator[str]:
    """Paragraphs and lists of facts, and question-and-answer pairs in the form of the chat template."""
    rng = random.Random(seed)
    countries, states, elements = _country_fields(), _states(), _elements()
    plain = PLAIN.strip().splitlines()
    for _ in range(count):
        shape = rng.random()
        if shape < 0.30:
            yield " ".join(_country_paragraph(rng, row) for row in rng.sample(countries, rng.randint(1, 3)))
        elif shape < 0.45:
            template = rng.choice(COUNTRY_TEMPLATES["capital"][:3])
            rows = rng.sample(countries, rng.randint(1, 8))
            yield rng.choice([" ", "\n"]).join(template.format(**row) for row in rows)
        elif shape < 0.53:
            yield " ".join(_state_sentence(rng, item) for item in rng.sample(states, rng.randint(1, 4)))
        elif shape < 0.61:
            yield " ".join(_element_sentence(rng, item) for item in rng.sample(elements, rng.randint(1, 4)))
        elif shape < 0.72:
            yield " ".join(rng.sample(plain, rng.randint(1, 5)))
        elif shape < 0.78:
            row = rng.choice(countries)
            question, answers = rng.choice(COUNTRY_QUESTIONS)
            yield f"Question: {question.format(**row)}\nAnswer: {rng.choice(answers).format(**row)}"
        else:
            turns = []
            for row in rng.sample(countries, rng.randint(1, 3)):
                question, answers = rng.choice(COUNTRY_QUESTIONS)
                turns.append(
                    f"{USER}\n{question.format(**row)}{ASSISTANT}\n{rng.choice(answers).format(**row)}"
                )
            yield "".join(turns)
