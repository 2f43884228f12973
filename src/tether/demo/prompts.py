"""Everyday prompts for the demo, composed from subjects and frames.

The held-out prompts share no subject with the training prompts, so a rise on them is not recall.
"""

import random

_ACTIVITIES = """
baking bread; learning the guitar; growing tomatoes; running in the rain; painting the kitchen; keeping a diary;
playing chess; swimming in a lake; knitting a scarf; cooking for eight people; walking to work; fixing old radios;
reading before bed; watching birds; learning Spanish; sorting old photographs; riding a bicycle; singing in a choir;
making soup; planting a tree; writing letters by hand; doing yoga; collecting stamps; camping by the sea;
cleaning the garage; folding paper cranes; learning to drive; building a bookshelf; taking cold showers;
playing the drums; drawing faces; going to bed early; making candles; hiking in the hills; teaching children to read;
dancing alone; repairing shoes; keeping bees; cutting hair at home; ironing shirts; fishing at dawn; brewing coffee;
juggling; studying maps; mowing the lawn; picking apples; sewing buttons; training a puppy; skipping breakfast;
solving crosswords; restoring furniture; travelling by train; gardening on a balcony; working from home
"""

_EVENTS = """
missed the bus; found a coin on the street; moved to a new flat; burned the dinner; passed the driving test;
forgot a birthday; got a new job; lost a glove; finished a long book; spilled coffee on a shirt; met an old friend;
slept through the alarm; won a small prize; broke a plate; got a haircut; failed an exam; planted some roses;
waited an hour for a train; received a letter; dropped a phone; learned a new song; caught a cold; adopted a cat;
got lost in the city; repaired a chair; ran five miles; heard a strange noise at night; gave a talk at work;
missed a deadline; painted a fence; baked a cake; argued with a neighbour; saw a rainbow; paid a large bill;
started school again; left the keys at home; made a new friend; cancelled a holiday; cleaned the whole house;
heard an owl; bought the wrong size; retired after thirty years; stood in the rain; lost a game of cards;
wrote a poem; locked the door twice; ate lunch alone; found an old photo; changed a flat tyre; skipped a meeting;
borrowed a ladder; quit a job; got a parking ticket; cooked for the first time
"""

_PLACES = """
the library; a quiet beach; the market; an old museum; the train station; a small island; the dentist; a farm;
the city park; a mountain hut; the airport; a bakery; the swimming pool; a lighthouse; the office; a night market;
the zoo; a desert; the harbour; an empty school; the theatre; a snowy village; the gym; a flower shop; the old bridge;
a campsite; the supermarket; a castle; the hospital; a riverside cafe; the post office; a forest path; the cinema;
a busy kitchen; the town hall; a vineyard; the barber; a rooftop; the bus stop; a boat; the playground; a waterfall;
the laundromat; a village fair; the observatory; a rented cabin; the basement; a wedding hall; the court house;
a music school; the car wash; a tea house; the border; a fishing pier
"""

_THINGS = """
a red umbrella; an old bicycle; a cup of black tea; a wool blanket; a second-hand piano; a paper map; a broken clock;
a bowl of rice; a wooden spoon; a new mattress; a pair of boots; a cactus; a long novel; a box of crayons; a used car;
a rainy Monday; a winter coat; a loud alarm clock; a goldfish; a slice of pizza; a stack of bills; a garden gnome;
a leaking tap; a fresh notebook; a bunch of keys; a window seat; an empty fridge; a jar of honey; a ticket to the opera;
a heavy suitcase; an email from the boss; a slow computer; a bag of lemons; a birthday card; a stray dog;
a sunny afternoon; a cold sandwich; a pocket knife; a crowded bus; a silver ring; a hole in the roof; a full moon;
a pair of glasses; a bus ticket; a stone from the beach; an early meeting; a borrowed book; a candle; a green hat;
a lost parcel; a kite; a bottle of water; a telephone bill; a week without internet
"""

_PEOPLE = """
my neighbour; my new boss; my grandmother; my little brother; my dentist; an old classmate; my landlord;
the mail carrier; my best friend; my piano teacher; a shy colleague; my daughter; the baker; my uncle in Canada;
a stranger on the bus;
my roommate; the new student; my father; a tired nurse; my cousin; the man next door; my son; a lost tourist;
my aunt; the school principal; my wife; the plumber; my team; a young writer; my husband; the bus driver; my doctor;
a friend who moved away; my sister; the librarian; my coach; a guest from Japan; my mother; the gardener; my twin;
a nervous actor; my old teacher; the waiter; a retired sailor; my niece; the interviewer; my tenant; a new father;
the electrician; my penpal; a bored child; my accountant; the choir; my grandfather
"""

_FAMILIES = (
    (_ACTIVITIES, (
        "I have started {}.",
        "Is {} worth the time?",
        "What should I know before {}?",
        "My friend spends every weekend {}.",
        "What do you say about {}?",
    )),
    (_EVENTS, (
        "Today I {}.",
        "My sister {} yesterday. What should I tell her?",
        "What would you say to someone who {}?",
        "I {} last week and I keep thinking about it.",
        "My colleague just {}.",
    )),
    (_PLACES, (
        "I am going to {} tomorrow.",
        "What is it like to spend a day at {}?",
        "Describe {} in the morning.",
        "We spent two hours at {}.",
        "Should I meet a friend at {}?",
    )),
    (_THINGS, (
        "What do you think of {}?",
        "Tell me something about {}.",
        "My day began with {}.",
        "Write a line about {}.",
        "What would you do with {}?",
    )),
    (_PEOPLE, (
        "What should I say to {}?",
        "I am having lunch with {} today.",
        "Write a short note to {}.",
        "How do I ask {} for help?",
        "I have not spoken to {} for a month.",
    )),
)  # fmt: skip


def everyday_prompts(num_train: int, num_held_out: int, *, seed: int) -> tuple[list[str], list[str]]:
    """Training prompts and held-out prompts, distinct and without a common subject; deterministic.

    Args:
        num_train: number of training prompts, at most 5 frames × 36 subjects × 5 families = 900.
        num_held_out: number of held-out prompts, at most 5 × 18 × 5 = 450.
        seed: decides which subjects are held out, and the order.
    """
    rng = random.Random(seed)
    train, held_out = [], []
    for subjects, frames in _FAMILIES:
        names = [name.strip() for name in subjects.split(";")]
        rng.shuffle(names)
        cut = len(names) * 2 // 3
        train += [frame.format(name) for name in names[:cut] for frame in frames]
        held_out += [frame.format(name) for name in names[cut:] for frame in frames]
    return rng.sample(train, num_train), rng.sample(held_out, num_held_out)
