"""The words that the multiple-choice sets are drawn from; entries are separated by semicolons, forms by slashes."""

from __future__ import annotations

NAMES = """Anna; Clara; Emma; Helen; Julia; Laura; Maria; Sarah; Alice; Diana; Susan; Lucy; Peter; Thomas; Daniel; George;
Henry; James; Martin; Oliver; Robert; Simon; David; Paul"""

# singular/plural
THINGS = """key/keys; book/books; letter/letters; picture/pictures; bottle/bottles; chair/chairs; coin/coins;
flower/flowers; ticket/tickets; stone/stones; candle/candles; basket/baskets; lamp/lamps; button/buttons; shirt/shirts;
pencil/pencils; clock/clocks; plate/plates; rope/ropes; drawing/drawings; hammer/hammers; ring/rings; map/maps; toy/toys"""

ADJECTIVES = "old; new; small; large; red; heavy; broken; beautiful; cheap; strange; wooden; green"

# country/capital, by continent; no country that lies on two
CAPITALS = {
    "Europe": """France/Paris; Italy/Rome; Spain/Madrid; Germany/Berlin; Greece/Athens; Portugal/Lisbon;
        Austria/Vienna; Hungary/Budapest; Poland/Warsaw; Norway/Oslo; Sweden/Stockholm; Finland/Helsinki;
        Denmark/Copenhagen; Ireland/Dublin; Belgium/Brussels; Romania/Bucharest; Bulgaria/Sofia; Serbia/Belgrade;
        Croatia/Zagreb; Ukraine/Kyiv; Iceland/Reykjavik; Estonia/Tallinn; Latvia/Riga; Lithuania/Vilnius;
        Malta/Valletta; Slovakia/Bratislava; Slovenia/Ljubljana; Albania/Tirana; Belarus/Minsk;
        Switzerland/Bern""",
    "Asia": """Japan/Tokyo; China/Beijing; Thailand/Bangkok; Vietnam/Hanoi; Indonesia/Jakarta; Malaysia/Kuala Lumpur;
        India/New Delhi; Pakistan/Islamabad; Nepal/Kathmandu; Afghanistan/Kabul; Bangladesh/Dhaka; Philippines/Manila;
        South Korea/Seoul; North Korea/Pyongyang; Mongolia/Ulaanbaatar; Iran/Tehran; Iraq/Baghdad;
        Syria/Damascus; Lebanon/Beirut; Jordan/Amman; Qatar/Doha; Yemen/Sanaa; Oman/Muscat; Cambodia/Phnom Penh;
        Bhutan/Thimphu; Saudi Arabia/Riyadh; Taiwan/Taipei; Laos/Vientiane; Bahrain/Manama""",
    "Africa": """Egypt/Cairo; Kenya/Nairobi; Ethiopia/Addis Ababa; Ghana/Accra; Nigeria/Abuja; Senegal/Dakar;
        Morocco/Rabat; Algeria/Algiers; Libya/Tripoli; Sudan/Khartoum; Uganda/Kampala; Zimbabwe/Harare; Zambia/Lusaka;
        Angola/Luanda; Somalia/Mogadishu; Rwanda/Kigali; Tunisia/Tunis; Madagascar/Antananarivo; Mozambique/Maputo;
        Namibia/Windhoek; Botswana/Gaborone; Mali/Bamako; Niger/Niamey; Malawi/Lilongwe; Liberia/Monrovia;
        Eritrea/Asmara; Togo/Lomé; Gabon/Libreville; Guinea/Conakry""",
    "America": """Canada/Ottawa; Cuba/Havana; Peru/Lima; Chile/Santiago; Argentina/Buenos Aires; Colombia/Bogota;
        Venezuela/Caracas; Ecuador/Quito; Bolivia/La Paz; Uruguay/Montevideo; Paraguay/Asuncion; Jamaica/Kingston;
        Haiti/Port-au-Prince; Honduras/Tegucigalpa; Nicaragua/Managua; Costa Rica/San José; Barbados/Bridgetown;
        Suriname/Paramaribo; Guyana/Georgetown; El Salvador/San Salvador""",
}

CATEGORIES = {
    "bird": """robin; sparrow; eagle; parrot; owl; crow; pigeon; swallow; duck; goose; penguin; falcon; pelican; raven;
        swan; heron; finch; seagull""",
    "fish": "salmon; trout; tuna; cod; herring; carp; sardine; pike; shark; mackerel; haddock; perch; anchovy; catfish",
    "fruit": """apple; banana; pear; cherry; grape; mango; peach; plum; lemon; strawberry; pineapple; melon; apricot;
        papaya; fig""",
    "vegetable": """carrot; cabbage; onion; potato; spinach; broccoli; lettuce; turnip; radish; cauliflower; celery;
        leek; beetroot; parsnip""",
    "tree": "oak; pine; birch; willow; maple; beech; elm; poplar; cedar; spruce; fir; sycamore; redwood",
    "tool": "hammer; saw; screwdriver; drill; wrench; chisel; shovel; rake; axe; spanner; crowbar",
    "instrument": """violin; piano; flute; trumpet; guitar; cello; drum; harp; clarinet; oboe; trombone; banjo;
        accordion; saxophone; tuba; mandolin""",
    "metal": "iron; copper; silver; gold; zinc; nickel; aluminium; tin; platinum; titanium; steel; brass; bronze",
    "disease": """malaria; measles; cholera; influenza; tuberculosis; smallpox; polio; diabetes; cancer; asthma;
        pneumonia; leprosy; typhoid""",
    "insect": """ant; bee; wasp; beetle; mosquito; butterfly; moth; grasshopper; dragonfly; cockroach; ladybird;
        termite""",
    "sport": """football; tennis; hockey; rugby; basketball; golf; boxing; rowing; baseball; badminton; fencing;
        volleyball; judo; swimming""",
    "language": """English; French; German; Spanish; Russian; Arabic; Hindi; Swahili; Portuguese; Italian;
        Greek; Latin; Turkish; Japanese""",
    "drink": "tea; coffee; milk; juice; beer; wine; lemonade; whisky; cider; vodka; champagne; cocoa; rum",
    "mammal": """horse; cow; dog; cat; elephant; lion; whale; bat; rabbit; mouse; wolf; bear; fox; goat; deer; kangaroo;
        dolphin; otter""",
    "fabric": "cotton; silk; wool; linen; velvet; denim; satin; nylon; polyester; cashmere; tweed",
    "furniture": "chair; table; sofa; wardrobe; desk; bookcase; armchair; stool; cupboard; bench; couch; dresser",
    "vehicle": "car; bus; lorry; truck; van; bicycle; motorcycle; tram; taxi; tractor; ambulance; jeep; scooter",
}

# By part of speech: the wrong answers are of the same one, and no word has a second opposite in the list.
OPPOSITES = {
    "adjective": """hot/cold; big/small; good/bad; happy/sad; rich/poor; young/old; strong/weak; fast/slow;
        light/dark; wet/dry; high/low; long/short; wide/narrow; thick/thin; clean/dirty; full/empty;
        early/late; loud/quiet; near/far; rough/smooth; sharp/blunt; deep/shallow; cheap/expensive;
        easy/difficult; right/wrong; open/closed; alive/dead; brave/cowardly; kind/cruel; guilty/innocent;
        polite/rude; safe/dangerous; sweet/sour; tight/loose; simple/complex; public/private; male/female;
        single/married; awake/asleep; beautiful/ugly; generous/selfish; honest/dishonest; lazy/hardworking;
        natural/artificial; optimistic/pessimistic; proud/humble; rare/common; temporary/permanent; tame/wild;
        useful/useless; visible/invisible; wise/foolish; fresh/stale; flexible/rigid; northern/southern""",
    "verb": """arrive/depart; begin/end; buy/sell; build/destroy; borrow/lend; catch/throw; cry/laugh;
        enter/exit; fail/succeed; find/lose; forget/remember; give/take; hate/love; increase/decrease;
        live/die; push/pull; save/spend; sit/stand; ask/answer; accept/reject; attack/defend; float/sink;
        freeze/melt; hide/reveal; join/separate; sleep/wake; teach/learn; lead/follow; allow/forbid;
        add/subtract; multiply/divide; export/import; punish/reward""",
    "noun": """day/night; summer/winter; friend/enemy; war/peace; top/bottom; north/south; east/west;
        heaven/hell; question/response; success/failure; profit/loss; health/illness; birth/death; truth/lie;
        future/past; joy/sorrow; husband/wife; king/queen; boy/girl; hero/villain; order/chaos;
        strength/weakness; predator/prey; master/servant; maximum/minimum; advantage/disadvantage;
        sunrise/sunset; courage/fear; wisdom/ignorance; noise/silence; poverty/wealth; buyer/seller;
        host/guest; winner/loser""",
}

# A verb and what one can do it to; none of the other verbs goes with it.
OBJECTS = {
    "drank": "tea; milk; juice; water; coffee",
    "ate": "apple; bread; cake; cheese; rice",
    "read": "newspaper; poem; novel; report; magazine",
    "wore": "hat; coat; dress; shirt; scarf",
    "drove": "car; truck; tractor; van; lorry",
    "climbed": "mountain; ladder; stairs; hill; cliff",
    "fed": "dog; cat; kitten; baby; puppy",
    "spent": "salary; savings; wages; pension; allowance",
    "played": "piano; guitar; violin; drums; flute",
    "lit": "candle; lamp; stove; torch; lantern",
    "answered": "phone; call; doorbell; telephone; knock",
    "told": "truth; lie; secret",
}


def entries(text: str) -> list[str]:
    """The entries of a list, whitespace made single."""
    return [" ".join(entry.split()) for entry in text.split(";")]


def pairs(text: str) -> list[tuple[str, str]]:
    """The two forms of every entry."""
    return [tuple(entry.split("/")) for entry in entries(text)]
