"""The words of the built-in English-German corpus, and their forms.

Each table is a block of aligned columns, one word per row, which is parsed into named tuples at import. *Tags*
determine which words go together: a noun has the tags of its row and its own English name, and a verb or an adjective
lists the tags it goes with. So streets can be wide and dogs tired, but not the other way round. The tables contain only
what no rule can derive (plurals, weak nouns, past forms); the rules of inflection are at the end.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

Gender = Literal["m", "f", "n"]
Case = Literal["nom", "acc", "dat"]
Article = Literal["the", "a", "no"]


class Noun(NamedTuple):
    """A noun. Its plural is empty if it is uncountable, or if singular and plural are the same."""

    english: str
    english_plural: str
    gender: Gender
    german: str
    german_plural: str
    weak: str  # ending of a weak noun in all singular cases except the nominative
    tags: frozenset[str]

    @property
    def is_person(self) -> bool:
        return "person" in self.tags

    @property
    def is_living(self) -> bool:
        return self.is_person or "animal" in self.tags


class Adjective(NamedTuple):
    """An adjective and the tags it fits. An absolute one (`locked`) cannot be combined with too or very."""

    english: str
    german: str
    is_absolute: bool
    fits: frozenset[str]


class Verb(NamedTuple):
    """A verb in both languages; German forms are without the separable prefix."""

    english: str
    english_past: str
    english_rest: str  # "over" of "jump over"
    infinitive: str
    german_present: str  # third person singular
    german_past: str
    prefix: str  # the separable prefix, "zu" of "zuhören"
    case: Case  # of its object


class Frame(NamedTuple):
    """An action with its possible subjects and objects, and the adjectives that prevent or motivate it.

    An adjective of `hinders` or `drives` refers to the subject or to the object, whichever it fits.
    """

    verb: Verb
    subjects: tuple[Noun, ...]
    objects: tuple[Noun, ...]
    hinders: tuple[Adjective, ...]
    drives: tuple[Adjective, ...]


# English, its plural, gender, German, its plural, weak ending, tags. A dash means empty.
_NOUNS = """
dog       dogs       m Hund        Hunde        -  animal small hunter jumper climber swimmer
fox       foxes      m Fuchs       Füchse       -  animal small hunter jumper climber swimmer
wolf      wolves     m Wolf        Wölfe        -  animal hunter jumper climber swimmer
bear      bears      m Bär         Bären        en animal hunter climber swimmer
lion      lions      m Löwe        Löwen        n  animal hunter jumper climber
tiger     tigers     m Tiger       Tiger        -  animal hunter jumper climber swimmer
donkey    donkeys    m Esel        Esel         -  animal grazer climber puller carrier
elephant  elephants  m Elefant     Elefanten    en animal grazer swimmer puller
cat       cats       f Katze       Katzen       -  animal small hunter jumper climber
cow       cows       f Kuh         Kühe         -  animal grazer swimmer puller
goat      goats      f Ziege       Ziegen       -  animal small grazer jumper climber
mouse     mice       f Maus        Mäuse        -  animal small
duck      ducks      f Ente        Enten        -  animal small
giraffe   giraffes   f Giraffe     Giraffen     -  animal grazer
tortoise  tortoises  f Schildkröte Schildkröten -  animal small
horse     horses     n Pferd       Pferde       -  animal grazer jumper climber swimmer
          puller carrier
sheep     -          n Schaf       -            -  animal grazer jumper climber
pig       pigs       n Schwein     Schweine     -  animal small hunter swimmer
rabbit    rabbits    n Kaninchen   Kaninchen    -  animal small grazer jumper
camel     camels     n Kamel       Kamele       -  animal grazer climber puller carrier
lamb      lambs      n Lamm        Lämmer       -  animal small grazer jumper climber
pony      ponies     n Pony        Ponys        -  animal grazer jumper climber swimmer
          puller carrier
man       men        m Mann        Männer       -  person worker
boy       boys       m Junge       Jungen       n  person worker
student   students   m Student     Studenten    en person worker
teacher   teachers   m Lehrer      Lehrer       -  person
farmer    farmers    m Bauer       Bauern       n  person worker
prince    princes    m Prinz       Prinzen      en person
woman     women      f Frau        Frauen       -  person worker
doctor    doctors    f Ärztin      Ärztinnen    -  person
queen     queens     f Königin     Königinnen   -  person
aunt      aunts      f Tante       Tanten       -  person
singer    singers    f Sängerin    Sängerinnen  -  person
child     children   n Kind        Kinder       -  person
girl      girls      n Mädchen     Mädchen      -  person
street    streets    f Straße      Straßen      -  crossing
bridge    bridges    f Brücke      Brücken      -  crossing
meadow    meadows    f Wiese       Wiesen       -  crossing
square    squares    m Platz       Plätze       -  crossing
river     rivers     m Fluss       Flüsse       -  crossing water-body
stream    streams    m Bach        Bäche        -  crossing barrier
field     fields     n Feld        Felder       -  crossing
valley    valleys    n Tal         Täler        -  crossing
ice       -          n Eis         -            -  -
lake      lakes      m See         Seen         -  water-body
bay       bays       f Bucht       Buchten      -  water-body
path      paths      m Weg         Wege         -  -
hill      hills      m Hügel       Hügel        -  height
mountain  mountains  m Berg        Berge        -  height
dune      dunes      f Düne        Dünen        -  height
fence     fences     m Zaun        Zäune        -  barrier
wall      walls      f Mauer       Mauern       -  barrier
hedge     hedges     f Hecke       Hecken       -  barrier
gate      gates      n Tor         Tore         -  barrier lockable
ditch     ditches    m Graben      Gräben       -  barrier
obstacle  obstacles  n Hindernis   Hindernisse  -  barrier
house     houses     n Haus        Häuser       -  home lockable
hut       huts       f Hütte       Hütten       -  home lockable
cave      caves      f Höhle       Höhlen       -  home
barn      barns      f Scheune     Scheunen     -  place lockable
stable    stables    m Stall       Ställe       -  place lockable
garden    gardens    m Garten      Gärten       -  place
forest    forests    m Wald        Wälder       -  place
village   villages   n Dorf        Dörfer       -  place
castle    castles    n Schloss     Schlösser    -  lockable
cart      carts      m Wagen       Wagen        -  pullable
carriage  carriages  f Kutsche     Kutschen     -  pullable
sled      sleds      m Schlitten   Schlitten    -  pullable
boat      boats      n Boot        Boote        -  pullable
basket    baskets    m Korb        Körbe        -  portable
crate     crates     f Kiste       Kisten       -  portable
bag       bags       f Tasche      Taschen      -  portable
parcel    parcels    n Paket       Pakete       -  portable
barrel    barrels    n Fass        Fässer       -  portable
apple     apples     m Apfel       Äpfel        -  plant fruit
pear      pears      f Birne       Birnen       -  plant fruit
carrot    carrots    f Karotte     Karotten     -  plant
hay       -          n Heu         -            -  fodder
grass     -          n Gras        -            -  fodder
bread     -          n Brot        -            -  plant savoury
meat      -          n Fleisch     -            -  savoury
cheese    -          m Käse        -            -  savoury
sausage   sausages   f Wurst       Würste       -  savoury
milk      -          f Milch       -            -  drink
water     -          n Wasser      -            -  drink
book      books      n Buch        Bücher       -  text gift
letter    letters    m Brief       Briefe       -  text gift
picture   pictures   n Bild        Bilder       -  ware gift
clock     clocks     f Uhr         Uhren        -  ware gift
coat      coats      m Mantel      Mäntel       -  ware gift
dress     dresses    n Kleid       Kleider      -  ware gift
car       cars       n Auto        Autos        -  ware
door      doors      f Tür         Türen        -  lockable
window    windows    n Fenster     Fenster      -  -
"""

# English, German, "!" if absolute, the tags and nouns it fits.
_ADJECTIVES = """
tired      müde         - animal person
hungry     hungrig      - animal person
thirsty    durstig      - animal person
sick       krank        - animal person
weak       schwach      - animal person
strong     stark        - animal person
lazy       faul         - animal person
nervous    nervös       - animal person
timid      ängstlich    - animal person
exhausted  erschöpft    - animal person
slow       langsam      - animal person
stubborn   stur         - animal person
curious    neugierig    - animal person
impatient  ungeduldig   - animal person
restless   unruhig      - animal person
brave      mutig        - animal person
careful    vorsichtig   - animal person
angry      wütend       - animal person
friendly   freundlich   - person dog donkey elephant cat cow goat horse pony
white      weiß         ! dog cat cow goat mouse duck horse sheep rabbit pony house fence wall coat
                          dress
black      schwarz      ! dog cat cow goat horse sheep rabbit pony bag coat dress car gate
old        alt          - animal man farmer teacher woman aunt queen bridge wall gate home place
                          castle pullable basket crate bag barrel book letter ware door
new        neu          - street bridge fence house hut barn stable pullable bag ware book door
                          window gate
big        groß         - animal square field meadow lake home place castle pullable portable fruit
                          sausage ware door window
small      klein        - animal boy child girl square field meadow lake home place castle pullable
                          portable fruit sausage ware door window
beautiful  schön        - cat horse pony meadow valley lake bay garden forest village house castle
                          carriage boat ware gift
dirty      schmutzig    - animal boy child street home place pullable portable coat dress car door
                          window water
wide       breit        - street square river stream field valley ditch hedge obstacle bay
narrow     schmal       - bridge path stream ditch river door
deep       tief         - river stream valley lake bay ditch
shallow    seicht       - river stream lake bay
murky      trüb         - river stream lake bay water
slippery   glatt        - street bridge ice path square
thin       dünn         - ice book letter coat
crowded    überfüllt    - street bridge square village
stony      steinig      - field meadow valley path hill mountain
swampy     sumpfig      - field meadow valley path forest
steep      steil        - path hill mountain dune street
high       hoch         - bridge hill mountain dune fence wall hedge gate obstacle
spooky     unheimlich   - home forest barn castle valley village
cramped    eng          - home barn stable
damp       feucht       - home barn stable hay
remote     abgelegen    - village hut castle lake valley house
heavy      schwer       - pullable portable gate door
bulky      sperrig      - pullable portable
light      leicht       - portable sled boat coat
broken     kaputt       ! pullable clock car door window gate
locked     verschlossen ! lockable crate
sour       sauer        - fruit milk
salty      salzig       - savoury water
bitter     bitter       - carrot grass hay water
dry        trocken      - savoury fodder
hard       hart         - fruit carrot bread cheese
fresh      frisch       - plant fodder savoury drink
juicy      saftig       - fruit carrot grass meat sausage
tasty      lecker       - plant savoury milk
expensive  teuer        - ware house castle carriage boat bag
boring     langweilig   - text picture
long       lang         - text bridge path coat dress
"""

# English, its past, rest, German infinitive, er-form, past, prefix, case of the object.
_VERBS = """
cross     crossed    -      überqueren     überquert     überquerte    -    acc
enter     entered    -      betreten       betritt       betrat        -    acc
leave     left       -      verlassen      verlässt      verließ       -    acc
climb     climbed    -      erklimmen      erklimmt      erklomm       -    acc
jump      jumped     over   überspringen   überspringt   übersprang    -    acc
swim      swam       across durchschwimmen durchschwimmt durchschwamm  -    acc
avoid     avoided    -      meiden         meidet        mied          -    acc
reach     reached    -      erreichen      erreicht      erreichte     -    acc
eat       ate        -      essen          isst          aß            -    acc
eat       ate        -      fressen        frisst        fraß          -    acc
drink     drank      -      trinken        trinkt        trank         -    acc
pull      pulled     -      ziehen         zieht         zog           -    acc
carry     carried    -      tragen         trägt         trug          -    acc
buy       bought     -      kaufen         kauft         kaufte        -    acc
sell      sold       -      verkaufen      verkauft      verkaufte     -    acc
open      opened     -      öffnen         öffnet        öffnete       -    acc
close     closed     -      machen         macht         machte        zu   acc
repair    repaired   -      reparieren     repariert     reparierte    -    acc
clean     cleaned    -      putzen         putzt         putzte        -    acc
translate translated -      übersetzen     übersetzt     übersetzte    -    acc
find      found      -      finden         findet        fand          -    acc
lift      lifted     -      heben          hebt          hob           hoch acc
pick      picked     up     holen          holt          holte         ab   acc
see       saw        -      sehen          sieht         sah           -    acc
hear      heard      -      hören          hört          hörte         -    acc
watch     watched    -      beobachten     beobachtet    beobachtete   -    acc
look      looked     for    suchen         sucht         suchte        -    acc
look      looked     at     sehen          sieht         sah           an   acc
chase     chased     -      jagen          jagt          jagte         -    acc
feed      fed        -      füttern        füttert       fütterte      -    acc
love      loved      -      lieben         liebt         liebte        -    acc
know      knew       -      kennen         kennt         kannte        -    acc
greet     greeted    -      begrüßen       begrüßt       begrüßte      -    acc
visit     visited    -      besuchen       besucht       besuchte      -    acc
call      called     -      rufen          ruft          rief          an   acc
invite    invited    -      laden          lädt          lud           ein  acc
help      helped     -      helfen         hilft         half          -    dat
follow    followed   -      folgen         folgt         folgte        -    dat
thank     thanked    -      danken         dankt         dankte        -    dat
trust     trusted    -      vertrauen      vertraut      vertraute     -    dat
listen    listened   to     hören          hört          hörte         zu   dat
give      gave       -      geben          gibt          gab           -    acc
show      showed     -      zeigen         zeigt         zeigte        -    acc
bring     brought    -      bringen        bringt        brachte       -    acc
sleep     slept      -      schlafen       schläft       schlief       -    acc
wait      waited     -      warten         wartet        wartete       -    acc
play      played     -      spielen        spielt        spielte       -    acc
work      worked     -      arbeiten       arbeitet      arbeitete     -    acc
sing      sang       -      singen         singt         sang          -    acc
dance     danced     -      tanzen         tanzt         tanzte        -    acc
run       ran        away   laufen         läuft         lief          weg  acc
run       ran        -      laufen         läuft         lief          -    acc
go        went       -      gehen          geht          ging          -    acc
"""

# German verb | subjects | objects | what hinders | what drives
_ACTIONS = """
überqueren     | animal person | crossing
    | tired weak lazy timid sick nervous exhausted stubborn wide deep slippery crowded swampy stony
      murky
    | curious impatient brave restless shallow
überqueren     | animal person | bridge | narrow long high |
überqueren     | dog fox wolf bear cat mouse duck horse rabbit pony person | ice
    | timid nervous careful slippery thin
    | curious impatient brave
betreten       | animal person | place
    | timid nervous stubborn lazy cramped damp spooky locked crowded swampy
    | curious hungry brave impatient
betreten       | small person | home
    | timid nervous stubborn cramped damp spooky locked
    | curious hungry brave impatient
verlassen      | animal person | place
    | tired weak lazy timid sick exhausted
    | hungry thirsty restless curious spooky damp cramped swampy crowded
verlassen      | small person | home
    | tired weak lazy timid sick exhausted
    | hungry thirsty restless curious spooky damp cramped
erklimmen      | climber person | height
    | tired weak lazy timid sick exhausted steep high stony
    | curious brave strong
überspringen   | jumper boy student prince | barrier
    | tired weak lazy timid sick exhausted slow stubborn high wide deep
    | brave impatient restless narrow
durchschwimmen | swimmer boy student prince | water-body
    | tired weak lazy timid sick exhausted slow deep wide murky
    | brave restless strong narrow
meiden         | animal person | crossing forest path village
    |
    | timid nervous careful slippery steep deep spooky crowded stony swampy murky
erreichen      | animal person | village hut castle lake valley
    | slow weak tired exhausted sick remote
    | impatient strong stubborn
folgen         | animal person | path
    | tired lazy timid stubborn exhausted steep narrow stony slippery swampy long
    | curious careful hungry
fressen        | grazer | plant fodder
    | sick nervous sour dry hard bitter
    | hungry fresh juicy tasty
fressen        | hunter | meat sausage | sick nervous salty dry | hungry fresh juicy tasty
fressen        | dog fox cat mouse duck pig | bread cheese
    | sick nervous salty dry hard
    | hungry fresh tasty
essen          | person | plant savoury
    | sick nervous sour salty dry hard bitter
    | hungry fresh juicy tasty
trinken        | animal person | water | sick nervous timid salty bitter murky | thirsty fresh
trinken        | small person | milk | sick nervous timid sour | thirsty fresh tasty
ziehen         | worker | cart sled boat | weak tired sick heavy bulky broken | strong light
ziehen         | puller | pullable
    | weak tired lazy sick exhausted stubborn heavy bulky broken
    | strong light
tragen         | carrier worker | portable
    | weak tired lazy sick exhausted stubborn heavy bulky
    | strong light
kaufen         | person | ware book house boat carriage plant cheese meat milk
    | expensive broken boring
    | beautiful fresh tasty
verkaufen      | person | ware house castle boat carriage book | | old broken expensive boring
öffnen         | person | gate door window crate parcel
    | weak timid locked heavy
    | curious impatient
zumachen       | person | gate door window crate | lazy heavy broken | careful nervous
reparieren     | worker | clock car door window pullable | lazy impatient tired | broken
putzen         | worker | window car door | lazy tired sick | dirty
übersetzen     | student teacher prince woman doctor queen | text
    | lazy tired impatient long boring
    | curious
finden         | person | gift parcel bag path | tired impatient | careful
hochheben      | worker | portable | weak tired sick exhausted heavy bulky | strong light curious
abholen        | person | parcel child girl crate car bag | |
sehen          | animal person | animal person | |
hören          | animal person | animal person | |
beobachten     | animal person | animal person | |
suchen         | person | animal person gift portable | |
ansehen        | animal person | animal person | |
jagen          | dog wolf lion tiger bear fox | rabbit goat sheep duck | |
jagen          | dog cat | mouse duck cat | |
füttern        | person | dog cat cow goat duck horse sheep pig rabbit pony lamb donkey | |
lieben         | person | person dog cat horse pony | |
kennen         | person | person village castle forest | |
begrüßen       | person | person | |
besuchen       | person | person village castle | |
anrufen        | person | person | |
einladen       | person | person | |
helfen         | person | person animal | |
folgen         | animal person | animal person | |
danken         | person | person | |
vertrauen      | person | person dog horse | |
zuhören        | person | person | |
"""

# German verb | subjects, for verbs without an object
_DOINGS = """
schlafen | animal person
warten   | animal person
spielen  | boy child girl dog cat lamb pony goat
arbeiten | man farmer student woman doctor horse donkey
singen   | person
tanzen   | person
weglaufen| animal boy child girl
"""

# English, German preposition, its nouns; each with the German dative.
_PLACES = """
in          in     garden barn stable forest village
in          auf    meadow field square street
on          auf    bridge hill
behind      hinter house barn hut wall hedge fence castle
in_front_of vor    house barn hut castle gate cave
next_to     neben  house path river lake castle
"""

# Destinations.
_GOALS = """
to zu river lake bridge forest castle barn stable gate hut meadow
"""

# Time expressions at the beginning of a sentence, in the past and in the present.
TIMES_PAST = (
    ("yesterday", "gestern"),
    ("this morning", "heute Morgen"),
    ("last night", "letzte Nacht"),
    ("last week", "letzte Woche"),
)
TIMES_PRESENT = (
    ("every day", "jeden Tag"),
    ("every morning", "jeden Morgen"),
    ("sometimes", "manchmal"),
)


def _rows(table: str, separator: str | None = None) -> list[list[str]]:
    lines = table.strip().replace("\n ", " ").splitlines()  # an indented line continues its row
    return [[cell.strip() for cell in line.split(separator)] for line in lines]


def _text(cell: str) -> str:
    return "" if cell == "-" else cell.replace("_", " ")


def _noun(row: list[str]) -> Noun:
    english, plural, gender, german, german_plural, weak, *tags = map(_text, row)
    tags_of_noun = frozenset([english, *tags])
    return Noun(english, plural, cast(Gender, gender), german, german_plural, weak, tags_of_noun)


def _verb(row: list[str]) -> Verb:
    english, past, participle, infinitive, er_form, german_past, prefix, case = map(_text, row)
    return Verb(
        english, past, participle, infinitive, er_form, german_past, prefix, cast(Case, case)
    )


NOUNS = tuple(_noun(row) for row in _rows(_NOUNS))
ADJECTIVES = tuple(
    Adjective(english, german, mark == "!", frozenset(fits))
    for english, german, mark, *fits in _rows(_ADJECTIVES)
)
VERBS = tuple(_verb(row) for row in _rows(_VERBS))

NOUN = {noun.english: noun for noun in NOUNS}
ADJECTIVE = {adjective.english: adjective for adjective in ADJECTIVES}
VERB = {verb.prefix + verb.infinitive: verb for verb in VERBS}


def nouns_with(tags: str) -> tuple[Noun, ...]:
    """The nouns with at least one of the tags, which are separated by spaces."""
    required = frozenset(tags.split())
    return tuple(noun for noun in NOUNS if noun.tags & required)


def fits(adjective: Adjective, noun: Noun) -> bool:
    """Whether the adjective can describe the noun."""
    return not adjective.fits.isdisjoint(noun.tags)


def _frame(row: list[str]) -> Frame:
    verb, subjects, objects, hinders, drives = row
    return Frame(
        VERB[verb],
        nouns_with(subjects),
        nouns_with(objects),
        tuple(ADJECTIVE[word] for word in hinders.split()),
        tuple(ADJECTIVE[word] for word in drives.split()),
    )


def _places(table: str) -> tuple[tuple[str, str, Noun], ...]:
    return tuple(
        (_text(english), german, NOUN[noun])
        for english, german, *nouns in _rows(table)
        for noun in nouns
    )


ACTIONS = tuple(_frame(row) for row in _rows(_ACTIONS, "|"))
DOINGS = tuple((VERB[verb], nouns_with(subjects)) for verb, subjects in _rows(_DOINGS, "|"))
PLACES = _places(_PLACES)
GOALS = _places(_GOALS)
GIVING = tuple(VERB[verb] for verb in ("geben", "zeigen", "bringen"))
GOING = tuple(VERB[verb] for verb in ("gehen", "laufen"))
BE = Verb("be", "was", "", "sein", "ist", "war", "", "nom")
CAN = Verb("can", "could", "", "können", "kann", "konnte", "", "acc")
NOTICING = tuple(VERB[verb] for verb in ("sehen", "beobachten", "suchen", "folgen"))
STATES = frozenset(VERB[verb] for verb in ("lieben", "kennen", "vertrauen"))  # never at a time


# Inflection. Every table has the columns masculine, feminine, neuter, plural.

_COLUMNS = {"m": 0, "f": 1, "n": 2, "p": 3}


def _table(nom: str, acc: str, dat: str) -> dict[Case, tuple[str, ...]]:
    def row(cells: str) -> tuple[str, ...]:
        return tuple("" if cell == "-" else cell for cell in cells.split())

    return {"nom": row(nom), "acc": row(acc), "dat": row(dat)}


_ARTICLES: dict[Article, dict[Case, tuple[str, ...]]] = {
    "the": _table("der die das die", "den die das die", "dem der dem den"),
    "a": _table("ein eine ein -", "einen eine ein -", "einem einer einem -"),
    "no": _table("kein keine kein keine", "keinen keine kein keine", "keinem keiner keinem keinen"),
}
_RELATIVES = _table("der die das die", "den die das die", "dem der dem denen")
_PRONOUNS = ("er", "sie", "es", "sie")
_WEAK = _table("e e e en", "en e e en", "en en en en")
_MIXED = _table("er e es en", "en e es en", "en en en en")
_STRONG = _table("er e es e", "en e es e", "em er em en")
_STEMS = {"hoch": "hoh", "teuer": "teur", "sauer": "saur"}  # hoch, but ein hoher Zaun


def article_form(article: Article, column: str, case: Case) -> str:
    """The German article; column is a gender, or p for the plural."""
    return _ARTICLES[article][case][_COLUMNS[column]]


def personal_pronoun(column: str) -> str:
    return _PRONOUNS[_COLUMNS[column]]


def relative_pronoun(column: str, case: Case) -> str:
    return _RELATIVES[case][_COLUMNS[column]]


def adjective_form(adjective: str, article: Article | None, column: str, case: Case) -> str:
    """The adjective before a noun: weak after der, mixed after ein and kein, otherwise strong."""
    endings = {"the": _WEAK, "a": _MIXED, "no": _MIXED, None: _STRONG}[article]
    stem = _STEMS.get(adjective, adjective.removesuffix("e"))
    return stem + endings[case][_COLUMNS[column]]


def noun_form(noun: Noun, case: Case, plural: bool = False) -> str:
    """The German noun: weak nouns have an ending in the singular, the others in the dative plural."""
    if not plural:
        return noun.german + (noun.weak if case != "nom" else "")
    takes_n = case == "dat" and not noun.german_plural.endswith(("n", "s"))
    return noun.german_plural + ("n" if takes_n else "")


def german_finite(verb: Verb, first_person: bool, plural: bool, past: bool) -> str:
    """The finite German verb without its prefix."""
    if past:
        stem = verb.german_past
        return stem if not plural else stem + ("n" if stem.endswith("e") else "en")
    if verb is BE:
        return "sind" if plural else "bin" if first_person else "ist"
    if plural:
        return verb.infinitive
    if first_person and verb is not CAN:
        return verb.infinitive.removesuffix("n").removesuffix("e") + "e"
    return verb.german_present


def english_third(verb: str) -> str:
    """He crosses, goes, carries, plays."""
    if verb.endswith(("s", "sh", "ch", "o", "x")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"
