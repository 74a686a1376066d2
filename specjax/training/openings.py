"""Openings of user turns, by topic, that steer what a target samples as its own prompts.

An opening is the first words of a user turn; the target continues it in its own words. Slots in
braces are filled at random from the lists below.
"""

import re
from collections.abc import Iterator

import numpy as np


def _choices(text: str) -> tuple[str, ...]:
    return tuple(choice.strip() for choice in text.split("|"))


SLOTS: dict[str, tuple[str, ...]] = {
    "subject": _choices(
        """volcanoes|the water cycle|renewable energy|the Roman Empire|photosynthesis|black holes|
        honey bees|the human heart|electric cars|coffee|the printing press|coral reefs|chess|
        the stock market|public libraries|earthquakes|antibiotics|the Silk Road|jazz music|sleep|
        machine learning|the moon|bread baking|city parks|vaccines|the French Revolution|gravity|
        migration of birds|the internet|soil|tea|bicycles|democracy|robots|whales|recycling|
        glaciers|the periodic table|inflation|ancient Egypt|computer games|forests|the brain|
        mountain climbing|rivers|social media|space travel|DNA|the olympic games|insurance|
        wolves|painting|batteries|time zones|languages|dinosaurs|airplanes|nutrition|
        the industrial revolution|solar panels|penguins|magnets|taxes|opera|wheat|
        the ocean floor|clocks|football|cheese|databases|
        bridges|cloud computing|poetry|the immune system|lightning|memory|markets|trains|
        spices|museums|climate change|encryption|gardens|marathon running|yoga|architecture|
        photography|the desert|submarines|maps|rice|violins|meditation|satellites|elections|ants|
        probability|steel"""
    ),
    "person": _choices(
        """Anna|Omar|Priya|Lucas|Mei|Grandmother|a young sailor|an old clockmaker|a tired teacher|
        a curious robot|Sofia|Daniel|a detective|a lonely lighthouse keeper|Kofi|Elena|a chef|
        two brothers|a student|Maria|a fox|a dragon|the mayor|a nurse|Tom|a violin player|Aisha|
        a farmer|an astronaut|a shy boy|a retired pilot|Nora|a street musician|the baker"""
    ),
    "place": _choices(
        """a small village|Paris|a space station|the mountains|a crowded city|an island|Tokyo|
        a quiet library|the desert|a farm|New York|a hospital|a train station|the forest|Nairobi|
        a castle|Lisbon|a school|the seaside|a market|Mexico City|
        an old house|a snowy town"""
    ),
    "task": _choices(
        """improve my sleep|learn to cook|save money each month|write a better essay|start running|
        prepare for a job interview|train a puppy|learn a new language|plan a birthday party|
        organize my desk|grow tomatoes|reduce stress|make new friends|study for an exam|
        fix a bicycle|
        give a speech|build a website|choose a laptop|clean a carpet|read more books|eat healthier|
        plan a trip|remember names|write a resume|stop procrastinating|paint a room|bake bread|
        invest a small amount of money|ask for a raise|learn the guitar|help my child read"""
    ),
    "language": ("French", "Spanish", "German", "Italian", "Portuguese", "Chinese", "Dutch"),
    "program": _choices(
        """reverses a string|checks if a number is prime|sorts a list of numbers|counts the vowels|
        finds the largest number in a list|computes the factorial|removes duplicates from a list|
        merges two sorted lists|reads a CSV file|prints the Fibonacci sequence|validates an email|
        converts Celsius to Fahrenheit|counts words in a file|implements a stack|finds the median|
        searches a sorted array|flattens a nested list|computes the sum of digits|rotates a matrix|
        checks for a palindrome|groups words by length|generates a random password|parses a date|
        implements a queue|draws a triangle of stars|computes the average|downloads a web page|
        finds common elements of two lists|transposes a matrix|simulates a dice roll"""
    ),
    "code_language": (
        "Python",
        "Python",
        "Python",
        "JavaScript",
        "Java",
        "C",
        "C++",
        "SQL",
        "HTML",
    ),
    "form": _choices(
        """short story|poem|letter|blog post|product description|speech|song|dialogue|diary entry|
        news article|short essay|email|advertisement|review|cover letter|thank-you note|fable|
        movie plot|tweet|recipe|haiku|toast|complaint|invitation|script for a short video"""
    ),
    "tone": (
        "formal",
        "friendly",
        "funny",
        "polite",
        "persuasive",
        "simple",
        "serious",
        "cheerful",
    ),
    "number": tuple(
        str(n) for n in (2, 3, 3, 4, 5, 5, 6, 7, 8, 10, 12, 15, 20, 24, 30, 45, 60, 100)
    ),
    "thing": _choices(
        """apples|books|pencils|tickets|cookies|marbles|boxes|miles|dollars|flowers|students|eggs|
        stickers|hours|liters of water|cars|cards|chairs|pages|coins|trees|bottles"""
    ),
    "country": _choices(
        """Japan|Brazil|Canada|Egypt|India|Norway|Kenya|Italy|Peru|Australia|France|Turkey|Mexico|
        Germany|Thailand|South Africa|Greece|Vietnam|Argentina|Iceland|Poland|Morocco"""
    ),
    "sentence": _choices(
        """The weather is|I would like|My sister works|We went to|The train leaves|Can you tell me|
        Yesterday I|The children are|She has never|Our teacher said|The meeting will|There are many|
        He forgot|I am looking for|The restaurant on|Please send|In the summer|They decided|
        If it rains|The book that"""
    ),
    "feeling": ("happy", "disappointed", "angry", "surprised", "bored", "excited", "worried"),
}

OPENINGS: dict[str, tuple[str, ...]] = {
    "conversation": (
        "Hi! I",
        "Hello, can you help me",
        "Hey, I have been thinking about {subject} and",
        "I feel {feeling} because",
        "What do you think about {subject}",
        "How can I {task}?",
        "I want to {task}, but",
        "Give me some advice on how to {task}",
        "What are some good ways to {task}",
        "My friend {person} wants to {task}. What should",
        "Tell me something interesting about {subject}",
        "Can you recommend",
        "I am planning to visit {country}. What",
        "Let's talk about {subject}. ",
        "What should I cook",
        "I have a problem with my",
        "Suggest {number} ideas for",
        "Brainstorm a list of",
        "Help me decide whether",
        "Pretend to be {person} in {place} and",
        "What is a good gift for",
        "Make a plan for a weekend in",
        "Create a schedule to {task}",
    ),
    "writing": (
        "Write a {form} about {subject}",
        "Write a {form} about {person} in {place}",
        "Write a {tone} {form} about",
        "Write a {tone} email to",
        "Write an email to my {person} asking",
        "Write a short story about {person} who",
        "Write a {form} in which",
        "Write a paragraph about {subject}",
        "Write an essay on the importance of {subject}",
        "Write a poem about {subject} that",
        "Write the opening of a novel set in {place}",
        "Write a {form} for a company that sells",
        "Write a cover letter for",
        "Create a slogan for",
        "Compose a {form} about {subject} with",
        "Continue this story: {person} was walking through {place} when",
        "Finish the sentence: {sentence}",
        "Describe {place} in a {tone} way",
        "Write {number} sentences using the words",
        "Write a title for an article about {subject}",
        "Rewrite this in a {tone} tone: {sentence}",
        "Make this sentence shorter: {sentence}",
        "Correct the grammar of this sentence: {sentence}",
        "Paraphrase the following text:\n\n{sentence}",
        "Rewrite the sentence in the passive voice.\n\n{sentence}",
        "Turn these notes into a paragraph:\n-",
        "Write a joke about {subject}",
        "Write a conversation between {person} and {person} about {subject}",
    ),
    "code": (
        "Write a {code_language} function that {program}",
        "Write a {code_language} program that {program}",
        "Write a function in {code_language} that takes",
        "How do I write code that {program} in {code_language}?",
        "Explain what this code does:\n\ndef ",
        "Explain the following {code_language} code:\n\n",
        "Fix the bug in this code:\n\n```python\n",
        "What is the difference between a list and",
        "How do I use {code_language} to",
        "Write a class in {code_language} that",
        "Write a unit test for a function that {program}",
        "Write a SQL query that",
        "Write a regular expression that",
        "Convert this code from Python to {code_language}:\n\n",
        "Create a simple web page with",
        "What does this error mean:",
        "Implement an algorithm that {program}",
        "Write a shell command that",
        "Complete the following function:\n\ndef ",
    ),
    "extraction": (
        "Extract the names of all people from the text below.\n\n{sentence}",
        "Extract the key facts from this paragraph:\n\n",
        "List the dates mentioned in the following passage.\n\n",
        "Find the main idea of this text:\n\n{subject}",
        "Identify the nouns in this sentence: {sentence}",
        "Identify the verbs in the sentence.\n\nSentence: {sentence}",
        "What is the sentiment of this review?\n\nThe",
        "Classify the following sentence as positive, negative or neutral: {sentence}",
        "Decide whether the statement is true or false.\n\nStatement:",
        "Which of these words does not belong:",
        "Turn this text into a table with columns name, price and",
        "Convert this list to JSON:\n",
        "Extract the keywords from this article:\n\n",
        "Sort the following items into categories:",
        "Classify these animals as",
        "Put these words in alphabetical order:",
        "Label the topic of this message as sports, politics, business or science.\n\n",
        "Rank these {thing} from",
        "Fill in the blank: {sentence}",
        "Read the email and list what has to be done.\n\nEmail: Dear {person},",
        "Choose the best answer.\n\nWhich",
    ),
    "question answering": (
        "What is {subject}?",
        "What is the capital of {country}",
        "Why is {subject} important",
        "Why do",
        "How does",
        "How do {subject} work",
        "Who was the first person to",
        "When did",
        "Where is",
        "What causes",
        "What is the difference between {subject} and",
        "Explain {subject} to a child",
        "Explain the concept of",
        "Explain why",
        "What are the main causes of",
        "What are the benefits of {subject}",
        "What are the pros and cons of {subject}",
        "Give {number} examples of",
        "Compare {subject} and {subject}",
        "Describe the history of {subject}",
        "List {number} facts about {subject}",
        "Define the word",
        "Give a synonym for",
        "Answer the question based on the passage.\n\nPassage: ",
        "Is it true that {subject}",
        "What happens if",
        "Name {number} famous",
        "Which country",
    ),
    "arithmetic": (
        "{person} has {number} {thing}. ",
        "{person} buys {number} {thing} for",
        "If {number} {thing} cost",
        "A store sells {thing} for",
        "There are {number} {thing} in",
        "Calculate",
        "Solve for x:",
        "What is {number} percent of",
        "A train travels",
        "{person} earns ${number} per hour and",
        "Find the area of",
        "What is the next number in the sequence",
        "Convert {number}",
        "A recipe needs {number}",
    ),
    "summaries": (
        "Summarize the following text.\n\n{subject}",
        "Summarize this paragraph in one sentence:\n\nThe",
        "Give a summary of the following article:\n\n",
        "Write a short summary of the history of {subject}",
        "Summarize the main points of this passage about {subject}:\n\n",
        "What is the following paragraph about?\n\nIn",
        "Shorten this text:\n\nFor many years, {subject}",
        "Summarize the conversation.\n\n{person}:",
        "Give the text below a title.\n\nIn {place}",
        "Summarize the plot of",
        "Simplify the following paragraph:\n\nAlthough {subject}",
        "Turn the following paragraph into bullet points.\n\nScientists",
        "Write a one-sentence summary of this news story:\n\n{country}",
    ),
    "translation": (
        "Translate to {language}: {sentence}",
        "Translate the following sentence into {language}.\n\n{sentence}",
        "Translate this text from English to {language}:\n\n{sentence}",
        "How do you say",
        "What is the {language} word for",
        "Translate these words to {language}:",
        "Translate the {language} sentence into English:",
        "What does this {language} phrase mean:",
        "Give {number} useful {language} phrases for",
        "Translate this email into {language}:\n\nDear {person},",
    ),
}

# openings of plain text, continued without a chat template
TEXT_OPENINGS: tuple[str, ...] = (
    "The sky is blue because",
    "Once upon a time, {person}",
    "The history of {subject} begins",
    "In {place}, {person}",
    "{subject} is",
    "The most important thing about {subject} is",
    "How to {task}: first,",
    "def ",
    "import ",
    "{sentence}",
    "Scientists have found that {subject}",
    "Q: What is {subject}?\nA:",
    "The capital of {country} is",
    "Dear {person},",
    "# {subject}\n\n",
    "Chapter 1\n\n{person}",
)

_SLOT = re.compile(r"\{(\w+)\}")


def fill(template: str, rng: np.random.Generator) -> str:
    """The template with every slot replaced by a random choice."""

    def choose(match: re.Match[str]) -> str:
        values = SLOTS[match.group(1)]
        return values[int(rng.integers(len(values)))]

    return _SLOT.sub(choose, template)


def user_openings(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """``count`` pairs of topic and opening, the topics in turn."""
    rng = np.random.default_rng(seed)
    topics = tuple(OPENINGS)
    for i in range(count):
        topic = topics[i % len(topics)]
        templates = OPENINGS[topic]
        yield topic, fill(templates[int(rng.integers(len(templates)))], rng)


def text_openings(count: int, seed: int) -> Iterator[str]:
    """``count`` openings of plain text."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield fill(TEXT_OPENINGS[int(rng.integers(len(TEXT_OPENINGS)))], rng)
