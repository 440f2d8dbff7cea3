"""Every prompt is a pure function of the seed: the same seed and count always give the same list, without
repeats.

A prompt is drawn from templates filled with subjects, objects, people, places, numbers and small passages
written for this file. The mixture covers what people ask of a small chat model: questions, explanations,
stories, letters, code, arithmetic, lists, rewriting, summarising, translation, role play, small talk and
follow-up turns, with and without a system prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

SUBJECTS = """photosynthesis; gravity; black holes; the water cycle; plate tectonics; vaccines; antibiotics;
DNA; evolution;
the immune system; the human heart; how the eye sees; sleep; memory; dreams; volcanoes; earthquakes;
tornadoes; the Moon; the tides; comets; the Sun; Mars; the speed of light; sound waves; magnets; electricity;
batteries; solar panels; wind power; nuclear energy; steam engines; bicycles; bridges; skyscrapers;
submarines; aeroplanes; rockets; satellites; radio; the telephone; the internet; search engines; computer
viruses; encryption; machine learning; neural networks; databases; operating systems; programming languages;
version control; algorithms; sorting; recursion; prime numbers; fractions; probability; statistics; geometry;
the Pythagorean theorem; calculus; infinity; zero; ancient Egypt; the Roman Empire; the Silk Road; the
Vikings; the Renaissance; the Industrial Revolution; the printing press; the French Revolution; the Cold War;
the Great Depression; the Olympic Games; democracy; inflation; taxes; supply and demand; interest rates; the
stock market; insurance; budgeting; trade unions; recycling; climate change; deforestation; coral reefs;
rainforests; deserts; glaciers; rivers; the food chain; biodiversity; bees; ants; whales; wolves; owls;
octopuses; dinosaurs; fossils; mushrooms; seeds; soil; composting; gardening; bread baking; cheese making;
coffee; tea; chocolate; fermentation; spices; nutrition; vitamins; dietary fibre; running; swimming; yoga;
chess; football; climbing; meditation; stress; friendship; empathy; patience; honesty; courage; leadership;
teamwork; public speaking; negotiation; time management; procrastination; learning a language; reading novels;
poetry; the sonnet; metaphors; myths; fairy tales; jazz; classical music; the piano; the violin; rhythm;
painting; watercolours; sculpture; photography; film making; theatre; architecture; fashion; weaving; pottery;
carpentry; maps; time zones; calendars; the metric system; money; libraries; museums; schools; elections;
courts of law; human rights; philosophy; stoicism; logic; the scientific method; placebo effects; genetics;
stem cells; robots; self-driving cars; 3D printing; virtual reality; video games; social media; online
privacy; passwords; spam; open source software; cloud computing; compilers; memory management; unit testing;
web browsers; HTTP; JSON; regular expressions; spreadsheets; trains; lighthouses; canals; clocks; glass;
paper; steel; plastic; concrete; rubber; soap; perfume; salt; sugar; rice; wheat; olives; honey; ice cream;
snow; fog; rainbows; lightning; the ozone layer; tardigrades"""

PLACES = """Paris; Tokyo; Nairobi; Lima; Oslo; Istanbul; Hanoi; Lisbon; Cairo; Toronto; Mexico City; Sydney;
Edinburgh;
Mumbai; Seoul; Athens; Prague; Buenos Aires; Iceland; Morocco; Vietnam; Scotland; Patagonia; the Alps; the
Sahara; the Amazon; New Zealand; Kyoto; Venice; Cape Town; Chicago; Berlin; Helsinki; Havana; Jakarta; a small
fishing village; a mountain hut; an old lighthouse; a desert town; a floating market; a space station; a quiet
library; a night train"""

PEOPLE = """a tired teacher; a young astronaut; an old fisherman; a shy librarian; a retired detective; a lost
tourist; a
clumsy wizard; a curious child; a lonely robot; a street musician; a nervous chef; a stubborn inventor; two
sisters; a bus driver; a beekeeper; a night watchman; a marine biologist; a clockmaker; a brave mouse; a
talking cat; a dragon who is afraid of fire; a gardener; a pilot; a nurse; a mapmaker; a ghost; a time
traveller; a blacksmith; a painter; a shepherd; a queen without a kingdom; a baker; a postman; a chess player;
a sailor; a young dancer; a scientist; a farmer"""

OBJECTS = """a broken watch; a red umbrella; an unopened letter; a silver key; a paper boat; a glass marble;
an old
photograph; a wooden flute; a blue bicycle; a map with no names; a lantern; a torn coat; a music box; a golden
feather; a notebook; a locked drawer; a jar of buttons; a compass; a mirror; a train ticket; a seed; a loaf of
bread; a kite; a bell"""

FOODS = """vegetable soup; pancakes; lentil curry; roast chicken; a green salad; tomato pasta; fried rice;
banana bread;
apple pie; omelettes; chilli; hummus; tacos; mushroom risotto; oatmeal; fish stew; potato gratin; noodle soup;
a fruit smoothie; homemade pizza; bean burgers; rice pudding; cornbread; dumplings; a cheese sandwich;
lemonade"""

ROLES = """a friendly teacher; a pirate captain; a strict editor; a patient doctor; a travel agent; a history
professor; a
personal trainer; a librarian; a chef; a software engineer; a poet; a job interviewer; a scientist; a
gardener; a lawyer; a museum guide; a detective; a grandmother giving advice; a sports commentator; a news
reporter; a football coach; a medieval knight; a ship's computer; a waiter in a small restaurant; a customer
support agent; a hotel receptionist"""

NAMES = """Anna; Ben; Chloe; David; Elena; Farid; Grace; Hiro; Ines; Jonas; Kavya; Liam; Maya; Noah; Olga;
Pedro; Quinn;
Rosa; Sam; Tara; Uma; Victor; Wendy; Yusuf; Zoe; Mr. Patel; Ms. Lopez; Dr. Chen; Professor Novak; Mrs.
Green"""

TONES = """formal; friendly; cheerful; serious; funny; calm; polite; enthusiastic; simple; poetic; dramatic;
neutral"""

AUDIENCES = """a five-year-old; a ten-year-old; a teenager; a beginner; a university student; my grandmother;
a busy manager;
someone who has never heard of it; a curious adult; a classroom of children; an engineer; a new employee; a
tourist"""

EVENTS = """a birthday party; a team meeting; a job interview; a wedding; a school trip; a job application; a
late delivery; a
broken washing machine; a dinner invitation; a missed deadline; a holiday request; a noisy neighbour; a lost
parcel; a refund for shoes that do not fit; a book club; a charity run; a farewell party; a doctor's
appointment; moving house; a music lesson; a conference talk; a parking problem; a cancelled flight; a pay
rise; a school project; a thank-you gift"""

LANGUAGES = "Python; Python; Python; JavaScript; Java; C; C++; Go; Rust; SQL; Bash; HTML; TypeScript; Ruby"

TASKS_CODE = """reverses a string; checks whether a number is prime; computes the factorial of a number; finds
the largest
element of a list; counts the words in a text; removes duplicates from a list; sorts a list of names; merges
two sorted lists; checks whether a word is a palindrome; prints the first n Fibonacci numbers; converts
Celsius to Fahrenheit; finds the greatest common divisor of two numbers; counts the vowels in a string; reads
a file line by line; computes the average of a list of numbers; finds the second largest number; transposes a
matrix; validates an e-mail address; generates a random password; capitalises every word; sums the digits of a
number; groups words by their first letter; implements a stack; implements a queue; implements binary search;
implements bubble sort; flattens a nested list; checks for balanced brackets; converts a decimal number to
binary; finds common elements of two lists; prints a multiplication table; rolls two dice a thousand times;
measures how long a function takes; parses a date; counts how often each character occurs; rotates a list by k
places; downloads a web page; writes a dictionary to a JSON file; finds all files in a folder; draws a
triangle of stars; simulates a bank account; stores contacts in a class; checks whether a year is a leap year;
swaps two variables; computes compound interest; finds the longest word in a sentence; splits a list into
chunks of size n"""

LANGUAGE_PAIRS = "French; Spanish; German; Italian; Portuguese; Dutch; Latin; Japanese"

PHRASES = """Good morning, how are you?; Where is the train station?; I would like a cup of coffee, please.;
Thank you for
your help.; What time does the museum open?; My name is Peter and I live in London.; The weather is beautiful
today.; I am learning a new language.; How much does this cost?; See you tomorrow.; The book is on the table.;
We are looking for a hotel.; Can you help me?; I lost my bag.; Happy birthday to you!; The children are
playing in the garden."""

SMALL_TALK = """Hi!; Hello there!; Hey, how are you today?; Good morning!; Good evening, what can you do?;
What's up?; Who are
you?; What is your name?; Who made you?; Are you a human?; Can you help me with something?; I'm bored.; I'm
feeling a bit sad today.; I had a great day!; I can't sleep.; Tell me something interesting.; Tell me a joke.;
Tell me a fun fact.; What's your favourite colour?; Do you like music?; Do you have feelings?; Can you keep a
secret?; What should I do this weekend?; I passed my exam!; I just moved to a new city and know nobody.; My
cat is ignoring me.; It's raining again.; I'm nervous about tomorrow.; Thanks for your help!; You're funny.;
What do you think about the weather?; Let's play a game.; Give me a riddle.; Say something nice.; I need
motivation.; I have a headache.; What is the meaning of life?; Are you able to learn from me?; Do you dream?;
Is it better to be early or late?; I forgot my friend's birthday.; I want to learn something new today.;
Surprise me.; Can we talk?; I need some advice.; How was your day?; Goodbye!"""

FOLLOW_UPS = """Can you give me an example?; Make it shorter.; Please explain that in simpler words.; Why is
that?; Rewrite it in
a more formal tone.; Turn that into a list.; What are the disadvantages?; Tell me more.; Summarise your answer
in one sentence.; Are you sure?; How would you explain this to a child?; What should I do first?; Now write it
as a poem.; Thanks! What else should I know?; Give me three more.; Which of these is the most important?; Can
you add a title?; What happens next?; Continue.; Translate that into French.; How does this compare with what
people did a hundred years ago?; Could you turn this into a table?; What is the most common mistake people
make here?; Now do the opposite.; I don't understand the second part.; Give me a question to test whether I
understood.; Make it funnier.; Is there an easier way?; How much would that cost?; Who should I ask about
this?; What would an expert say?; Thank you, that was helpful."""

SYSTEMS = """You are a helpful assistant.; You are a concise assistant. Answer in at most two sentences.; You
are a patient tutor
who explains things step by step.; You are a creative writer with a vivid imagination.; You are an expert
programmer. Write clean code and explain it briefly.; You answer politely and formally.; You are a cheerful
assistant who likes simple examples.; You are a careful assistant. If you do not know something, say so.; You
are a mathematics teacher.; You are a travel guide who knows many places.; You are a cooking assistant.; You
are an editor. Improve the text you are given.; Be brief and direct.; You are a storyteller for children.;
Answer with bullet points whenever possible.; You are a professional e-mail assistant.; You are a friendly
companion for everyday conversation.; You are a science communicator."""

LIST_SUBJECTS = """ways to save water at home; healthy breakfasts; books for children; ideas for a rainy day;
tips for better
sleep; uses of a paper clip; reasons to learn history; facts about the ocean; ways to say thank you; cheap
dinners; inventions that changed the world; names for a small bakery; names for a black cat; questions for a
job interview; habits of successful students; things to pack for a hike; indoor plants that need little light;
exercises without equipment; gifts for a teacher; animals that live in the desert; rivers in Europe; words
that rhyme with "light"; synonyms for "happy"; opposites of "large"; steps to plan a party; safety rules for
cycling; ways to reduce stress; careers in science; topics for a school essay; games for a long car journey;
musical instruments; renewable energy sources; planets of the solar system; programming languages and what
they are used for; mistakes to avoid in an interview; questions to ask a grandparent; ways to reduce plastic
waste; uses of vinegar; famous painters; primary colours and how to mix them"""

QUESTIONS = """What is the capital of {country}?; How many days are there in a leap year?; Why is the sky
blue?; Why do leaves
change colour in autumn?; How do birds find their way?; Why is the sea salty?; What is the largest planet in
the solar system?; Who wrote "Romeo and Juliet"?; How long does it take light to reach us from the Sun?; Why
do we yawn?; What is the difference between a virus and a bacterium?; How do I boil an egg?; How do I remove a
coffee stain?; Why do cats purr?; What language do people speak in {country}?; What is {country} famous for?;
Which continent is {country} in?; What is the boiling point of water?; How many continents are there?; What is
the tallest mountain on Earth?; What is the chemical symbol for gold?; Who painted the Mona Lisa?; How do I
tie a tie?; What is a synonym for "{word}"?; Use the word "{word}" in a sentence.; What does the word "{word}"
mean?; How do you spell "{word}"?; What is the opposite of "{word}"?; Give me three words that are related to
"{word}".; Write a haiku about the word "{word}".; What food should I try in {country}?"""

COUNTRIES = """France; Japan; Brazil; Kenya; Canada; Egypt; India; Australia; Spain; Norway; Peru; Turkey;
Greece; Vietnam;
Morocco; Argentina; Poland; Sweden; Thailand; Ireland; Mexico; Nigeria; Portugal; Italy; Germany; China; South
Korea; Chile"""

WORDS = """curious; resilient; ancient; bright; generous; fragile; enormous; silent; harvest; journey;
ambiguous; courage;
meticulous; ordinary; gentle; brisk; wander; shelter; genuine; obscure; reluctant; abundant; horizon; whisper;
necessary; efficient; spontaneous; melancholy; vivid; hesitate; persuade; transparent; tradition; compromise;
stubborn; serene"""

EXPLAIN = """Explain {subject} to {audience}.; What is {subject}?; How does {subject} work?; Why does
{subject} matter?; Give me a
short introduction to {subject}.; What are three important facts about {subject}?; What are the main benefits
of {subject}?; What are the risks or limits of {subject}?; Compare {subject} and {subject2}.; How are
{subject} and {subject2} connected?; Write a short paragraph about {subject}.; Write a quiz question about
{subject} and give the answer.; What is a common misconception about {subject}?; Describe the history of
{subject} in a few sentences.; Write an introduction for an essay about {subject}.; Give me a simple analogy
for {subject}.; How would I start learning about {subject}?; What would the world be like without {subject}?;
Is {subject} overrated? Give both sides.; Make a short study plan for {subject}.; Write a conclusion for an
article about {subject}.; Write five quiz questions about {subject}.; What should {audience} know about
{subject}?; Describe {subject} in exactly three sentences.; Give me a headline and a short news story about
{subject}.; Write a social media post about {subject}.; What questions do people often ask about {subject}?;
Tell me an interesting story about {subject}.; Explain the difference between {subject} and {subject2} to
{audience}.; Write a dialogue between two friends about {subject}.; Pros and cons of {subject}?; tell me about
{subject}; {subject}?; I have to give a talk about {subject}. How should I begin?; Define {subject} and give
one example.; Which jobs have to do with {subject}?"""

CREATE = """Write a short story about {person} and {object}.; Write a story that begins in {place} and ends
with {object}.; Write a
poem about {subject}.; Write a poem about {object} in {place}.; Describe {place} in a {tone} tone.; Write the
opening paragraph of a mystery set in {place}.; Write a dialogue between {person} and {person2}.; Invent a
legend that explains {subject}.; Write a bedtime story about {person}.; Write a diary entry of {person} in
{place}.; Write a limerick about {person}.; Describe {object} without naming it.; Write a song verse about
{subject}.; Continue this story: "{name} opened the door and saw {object}."; Continue this story: "On the last
day of winter, {person} arrived in {place}."; Give {person} a name and describe a normal day.; Write a letter
from {person} to {person2}.; Write a funny advertisement for {object}.; Write a scene in which {person}
teaches {person2} about {subject}.; Write a six-sentence story with a surprise ending about {person}.; Imagine
{person} finds {object} in {place}. What happens?; Write a motto for {person}."""

LETTERS = """Write a {tone} e-mail to {name} about {event}.; Write a short message to {name} to apologise for
{event}.; Draft a
{tone} letter about {event}.; Help me reply to this message from {name}: "Can we talk about {event}
tomorrow?"; Write an invitation for {event}.; Write a reminder for {name} about {event}.; Write a {tone}
thank-you note to {name} after {event}.; Write a text message that cancels {event}.; What should I say to
{name} about {event}?; Write a complaint about {event}.; Make a checklist for {event}.; Give me advice on how
to prepare for {event}.; Write an e-mail subject line and three sentences about {event}.; Write a polite
refusal to {name} because of {event}.; Plan {event} for {number} people in {place}."""

EVERYDAY = """How do I make {food}?; Give me a recipe for {food} for {number} people.; What can I serve with
{food}?; Which ingredients
do I need for {food}?; Can I make {food} without an oven?; How do I make {food} healthier?; Plan a weekend in
{place}.; What should I pack for {place}?; Write a three-day itinerary for {place} with {number} stops.;
Suggest {number} things to do in {place}.; What is the best time of year to visit {place}?; Describe the food
of {country}.; My friend {name} only likes {food}. What else could I cook?; I have {number} minutes and {food}
to prepare. What do I do?; Tell me about daily life in {country}.; Help me plan a week of dinners that starts
with {food}."""

LISTS = """List {number} {list}.; Give me {number} {list}.; Name {list}.; What are some {list}? Explain each
one briefly.; I need ideas:
{list}.; Make a table of {list}.; Rank {number} {list} and say why.; Give me {number} unusual {list}.; Write a
short guide: {list}.; Can you suggest {list} for {audience}?"""

CODE = """Write a {language} function that {code}.; Write a {language} program that {code} and explain how it
works.; How do I write
{language} code that {code}?; Show me a simple example in {language} that {code}.; Write a unit test for a
{language} function that {code}.; Explain step by step how a program {code}.; Write pseudocode for a function
that {code}.; I am new to {language}. Write a script that {code}, with comments.; What is the time complexity
of code that {code}?"""

REWRITE = r"""Summarise the following text in one sentence:\n\n{passage}; Summarise this:\n{passage}; Rewrite
the text in a {tone}
tone.\n\n{passage}; What is the main idea of this text?\n\n{passage}; {passage}\n\nGive this text a title.;
List the key points of the following passage.\n\n{passage}; Correct the grammar and improve the style:
"{passage}"; Read the passage and answer: who is it about and what happens?\n\n{passage}; Rewrite this as a
short e-mail:\n\n{passage}; Extract the names and numbers from this text:\n\n{passage}; Make this text
shorter: {passage}; Write two questions about this passage.\n\n{passage}; What happens next? {passage}; Is the
tone of this text positive or negative? Explain.\n\n{passage}; {passage} Explain why someone would do that.;
Turn this into a news headline: {passage}"""

SENTENCES = """{Name} has worked in {place} for {number} years and knows everything about {subject}.; Last
week {name} bought
{object} for {money} dollars at a market.; The local council announced a new plan about {subject}, and
{number} people came to the meeting.; Many visitors say that the most surprising thing in {place} is the food,
especially {food}.; {Person} found {object} behind the station and decided to keep it.; The report says that
interest in {subject} has grown by {percent} percent since last year.; At first nobody believed the news, but
{name} checked the numbers twice.; Every morning {person} walks past the school and thinks about {subject}.;
The workshop starts at {hour} o'clock and costs {money} dollars, with a discount for students.; Because of the
heavy rain, {event} had to be moved to Friday.; {Name} says that {subject} is easier to understand than most
people think.; The team tested {number} ideas, and only one of them worked.; Nobody in {place} had ever seen
{object} before.; In the end, {name} and {person} agreed to share the work.; The old building will be turned
into a small museum about {subject}.; Prices went up by {percent} percent, so many families changed their
plans.; A new study with {money} volunteers looked at {subject} and found a small but clear effect.; Some
people dislike the idea, yet most agree that something has to change."""

MATHS = """What is {a} + {b}?; What is {a} - {b}?; What is {c} times {d}?; What is {a} divided by {d}?;
Calculate {c} * {d} + {b}.; Solve for x: {d}x + {c} = {a}.; What is {percent}% of {a}?; {name} has {c} apples
and gives {d} to {name2}.
How many are left?; A train travels {a} kilometres in {d} hours. What is its average speed?; A book costs {c}
dollars and is reduced by
{percent} percent. What is the new price?; What is the area of a rectangle that is {c} metres long and {d}
metres wide?; Is {a} a prime number?; What comes next in the sequence {d}, {d2}, {d3}, ...?; Convert {a}
minutes to hours and minutes.; Convert {c} kilometres to miles.; If {d} pens cost {c} dollars, how much do {b}
pens cost?; Round {a}.{b} to the nearest whole number.; What is the square of {d}?; {name} runs {d} kilometres
every day. How far is that in {c} days?; Find the average of {a}, {b} and {c}.; Write {a} as a product of
primes.; What is the perimeter of a square with side {c}?; Explain how to add {d}/{c} and 1/{d}.; Show the
steps: {a} + {b} * {d}.; There are {a} students and each bus holds {c}. How many buses do we need?"""

TRANSLATE = """Translate into {foreign}: "{phrase}"; How do you say "{phrase}" in {foreign}?; How do you say
"{word}" in {foreign}?; What
does "{phrase}" mean, and when would I say it?; Write three useful phrases in {foreign} for a trip."""

ROLE_PLAY = """Pretend you are {role}. I ask you about {subject}.; You are {role}. Greet me and ask how you
can help.; Act as {role} and
give me advice about {event}.; Let's role-play: you are {role}, I am {person}. You start.; As {role}, explain
{subject}.; Speak like {role} and describe {place}.; Imagine you are {object}. Tell me about your day.; What
would {role} say about {subject}?; You are {role}. {name} asks you how to make {food}."""

ADVICE = """I want to get better at {subject}. Where do I start?; How can I talk to {name} about {event}?; I
feel stressed because of
{event}. What can I do?; Should I spend my free time on {subject} or {subject2}?; How do I explain {event} to
my boss?; I only have {number} minutes a day for {subject}. Is that enough?; My colleague {name} never
listens. What should I do?; Help me decide: a trip to {place} or {place2}?; How do I stay motivated when I
study {subject}?; Give me a daily routine for {person}.; What are good arguments for and against teaching
{subject} in schools?; How can I save {money} dollars in {number} months?"""


def _items(text: str) -> list[str]:
    return [part.replace("\\n", "\n") for part in text.replace("\n", " ").split("; ")]


SLOTS = {
    "subject": SUBJECTS, "subject2": SUBJECTS, "place": PLACES, "place2": PLACES, "person": PEOPLE, "person2":
    PEOPLE, "object": OBJECTS, "food": FOODS, "role": ROLES, "name": NAMES, "name2": NAMES, "tone": TONES,
    "audience": AUDIENCES, "event": EVENTS, "language": LANGUAGES, "code": TASKS_CODE, "foreign":
    LANGUAGE_PAIRS, "phrase": PHRASES, "list": LIST_SUBJECTS, "country": COUNTRIES, "word": WORDS,
}  # fmt: skip

# Share of each kind of request; follow-up turns and system prompts are drawn on top.
MIXTURE = {
    EXPLAIN: 24, CREATE: 15, LETTERS: 8, EVERYDAY: 8, LISTS: 6, CODE: 8, REWRITE: 8, MATHS: 7, TRANSLATE: 2,
    ROLE_PLAY: 5, ADVICE: 5, QUESTIONS: 3, SMALL_TALK: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """The user's side of a chat: an optional system prompt, one user message per turn, and the sampling
    temperature (0 is greedy) for the replies."""

    system: str | None
    turns: tuple[str, ...]
    temperature: float


def _numbers(rng: random.Random) -> dict[str, Callable[[], str]]:
    step = rng.randint(2, 9)
    first = rng.randint(2, 20)
    return {
        "number": lambda: str(rng.randint(3, 9)), "a": lambda: str(rng.randint(20, 400)),
        "b": lambda: str(rng.randint(2, 99)), "c": lambda: str(rng.randint(3, 60)), "d": lambda: str(first),
        "d2": lambda: str(first + step), "d3": lambda: str(first + 2 * step), "hour": lambda:
        str(rng.randint(1, 12)), "percent": lambda: str(rng.choice((5, 10, 15, 20, 25, 30, 40, 50))), "money":
        lambda: str(rng.randint(5, 900)),
    }  # fmt: skip


def _fill(template: str, rng: random.Random) -> str:
    numbers = _numbers(rng)

    def value(slot: str) -> str:
        if slot == "passage":
            sentences = rng.sample(_items(SENTENCES), rng.randint(2, 5))
            return " ".join(_fill(sentence, rng) for sentence in sentences)
        if slot in numbers:
            return numbers[slot]()
        text = rng.choice(_items(SLOTS[slot.lower()]))
        return text[0].upper() + text[1:] if slot[0].isupper() else text

    parts = template.split("{")
    filled = parts[0]
    for part in parts[1:]:
        slot, rest = part.split("}", 1)
        filled += value(slot) + rest
    return filled[0].upper() + filled[1:] if rng.random() < 0.95 else filled


def make_prompts(count: int, seed: int) -> list[Prompt]:
    """Draws `count` prompts with distinct first messages; half are to be answered greedily and half at
    temperature 0.7."""
    rng = random.Random(seed)
    kinds, shares = list(MIXTURE), list(MIXTURE.values())
    seen: set[str] = set()
    prompts: list[Prompt] = []
    while len(prompts) < count:
        kind = rng.choices(kinds, shares)[0]
        turns = [_fill(rng.choice(_items(kind)), rng)]
        while len(turns) < 3 and rng.random() < 0.16:
            turns.append(rng.choice(_items(FOLLOW_UPS)))
        system = rng.choice(_items(SYSTEMS)) if rng.random() < 0.3 else None
        if turns[0] not in seen:
            seen.add(turns[0])
            prompts.append(Prompt(system, tuple(turns), 0.7 if len(prompts) % 2 else 0.0))
    return prompts
