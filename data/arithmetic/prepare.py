"""
Makes the arithmetic tasks: word problems whose answers are right by construction.

    python data/arithmetic/prepare.py                      # 240 to train on, three held-out files of 60
    python data/arithmetic/prepare.py --seed 1 --heldout 300 --output-dir data/arithmetic-s1

Four files, one JSON object a line, {"id", "prompt", "answer", "task", "family", "kind", "steps", "solution"}:

    train.jsonl              word problems of two to four steps with + - * and exact /
    heldout-same.jsonl       other problems from the same wordings
    heldout-wording.jsonl    the same operations in wordings that no training text ever shows (HELDOUT_STORIES)
    heldout-different.jsonl  counting, calendar and ordering; --easy gives one-step ones with small numbers

What keeps the files apart is no list of seen problems but a hash: the sha256 of a problem's normalised text says which
split may use it (SPLITS). So files are disjoint for every pair of seeds and sizes, and so is the training text of
data/tiny, which draws from the split "corpus" alone. The same seed gives the same bytes: only random.Random and sha256
are used, both the same on every machine. A longer file of a seed begins with the shorter one.

A problem is a list of steps, never a text that is parsed back. Its worked solutions are written from the steps, terse
or verbose, and so are solutions with one slip that is carried on to a wrong answer.
"""

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = "End with #### and the answer."

# Share of all problems, in percent of the hash, that each use may draw from.
SPLITS = {"heldout": range(0, 12), "train": range(12, 24), "valid": range(24, 28), "corpus": range(28, 100)}

# ---------------------------------------------------------------------------------------------------------------------
# Words that fill the wordings. Every thing is one word in the plural, so that a wording reads well with each of them.

NAMES = [(name, "she", "her") for name in (
    "Mia Lea Ana Zoe Eva Ida Nora Ella Lucy Rosa Emma Clara Ruth Maya Amy Sara Lily Tina Jane Kate Hana Leila").split()]
NAMES += [(name, "he", "his") for name in (
    "Tom Ben Leo Max Sam Jan Paul Omar Finn Noah Adam Ivan Luis Hugo Dan Mark Jack Eli Carl Ravi Ken Theo").split()]
THINGS = ("apples books shells stickers marbles coins cards pencils stamps buttons beads eggs flowers plums cookies "
          "balloons stones toys oranges cups pears lemons nuts candles crayons muffins ribbons tickets photos keys "
          "badges dolls bricks spoons peaches tulips seeds cakes masks kites").split()
BOXES = [("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("jar", "jars"), ("crate", "crates"),
         ("tray", "trays"), ("bowl", "bowls"), ("drawer", "drawers"), ("case", "cases"), ("pack", "packs")]
WORDS = ("cat dog sun tree lamp fish bird moon star rain river stone table chair bread house horse light water paper "
         "garden window bottle flower winter summer yellow school kitchen morning").split()
WEEK = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = {"January": 31, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31, "September": 30,
          "October": 31, "November": 30}

# ---------------------------------------------------------------------------------------------------------------------
# Wordings. A row: kind, steps, ranges of the given numbers, phrasings, one verbose sentence a step ("@" is the
# equation). The steps use the given numbers a to e, earlier results p to s and plain numbers.

STORIES = [
    # two steps
    ("more_then_less", "p=a+b q=p-c", "a:3-60 b:3-40 c:2-50", [
        "{name} has {a} {things}. {He} finds {b} more and then loses {c}. How many {things} does {name} have now?",
        "{name} had {a} {things} in the morning, got {b} at noon and gave {c} to {other}. How many are left?",
        "There were {a} {things} in the {box}. {name} put in {b} more. {other} took out {c}. "
        "How many {things} are in the {box}?",
        "{a} {things} and {b} {things} lie together. {name} takes {c} of them away. How many {things} stay?"],
     ["With the new ones there are @ {things}.", "When some are gone, @ {things} are left."]),
    ("boxes_less", "p=a*b q=p-c", "a:2-12 b:2-12 c:2-50", [
        "{name} has {a} {boxes} with {b} {things} in each. {He} gives {c} {things} to {other}. How many are left?",
        "Each of {a} {boxes} holds {b} {things}. {c} {things} are broken. How many {things} are fine?",
        "{name} bought {a} {boxes} of {b} {things}. {He} used {c} of them. How many {things} does {he} still have?"],
     ["The {a} {boxes} hold @ {things}.", "Taking away {c} leaves @ {things}."]),
    ("boxes_more", "p=a*b q=p+c", "a:2-12 b:2-12 c:2-50", [
        "{name} fills {a} {boxes} with {b} {things} each and has {c} {things} over. "
        "How many {things} are there in all?",
        "There are {a} {boxes} of {b} {things} on the table and {c} {things} on the floor. "
        "How many {things} is that together?",
        "{other} gave {name} {c} {things}. {name} also has {a} {boxes} with {b} {things} in each. "
        "How many {things} does {name} have?"],
     ["In the {boxes} there are @ {things}.", "With the other {c} that makes @ {things}."]),
    ("add_then_share", "p=a+b q=p/c", "a:3-60 b:3-60 c:2-12", [
        "{name} picks {a} {things} and {other} picks {b}. They share them equally among {c} friends. "
        "How many {things} does each friend get?",
        "{name} has {a} {things} and {b} {items}. {He} puts all of them into {c} equal groups. "
        "How many are in a group?",
        "{a} {things} from {name} and {b} from {other} go into {c} {boxes}, the same number in each. "
        "How many {things} are in one {box}?"],
     ["Together there are @ pieces.", "Shared in {c} equal parts, each part has @."]),
    ("share_then_less", "p=a/b q=p-c", "a:8-144 b:2-12 c:2-11", [
        "{a} {things} are shared equally by {b} children. {name}, one of them, eats {c}. "
        "How many does {name} have left?",
        "{name} puts {a} {things} into {b} {boxes} evenly. From one {box} {he} takes {c}. "
        "How many {things} are left in that {box}?",
        "{b} friends split {a} {things} evenly. {name} gives {c} of {his} share to {other}. "
        "How many does {name} keep?"],
     ["One share is @ {things}.", "After {c} are gone, @ are left."]),
    ("less_then_share", "p=a-b q=p/c", "a:10-150 b:2-60 c:2-12", [
        "{name} has {a} {things}. {He} keeps {b} and shares the rest equally among {c} friends. "
        "How many {things} does each friend get?",
        "Of {a} {things}, {b} are sold. The others go into {c} {boxes}, the same number in each. "
        "How many {things} are in one {box}?",
        "A shop had {a} {things} and threw {b} away. {c} people bought the rest in equal parts. "
        "How many {things} did each one buy?"],
     ["There are @ {things} to share.", "Each part has @ {things}."]),
    ("change", "p=a*b q=c-p", "a:2-12 b:2-12 c:10-200", [
        "{name} buys {a} {things} for {b} dollars each and pays with {c} dollars. How much money does {he} get back?",
        "One {box} of {things} costs {b} dollars. {name} has {c} dollars and buys {a} {boxes}. "
        "How many dollars are left?",
        "{name} has {c} dollars. {He} pays {a} times {b} dollars for {things}. How much does {he} have then?"],
     ["All of it costs @ dollars.", "From {c} dollars @ dollars are left."]),
    ("times_together", "p=a*k q=p+a", "a:2-33 k:2-5", [
        "{name} has {a} {things}. {other} has {k} times as many. How many {things} do they have together?",
        "There are {a} {things} and {k} times as many {items}. How many is that in all?",
        "{name} found {a} {things} on Monday and {k} times that number on Tuesday. How many {things} did {he} find?"],
     ["The larger number is @.", "Together that is @."]),
    ("older", "p=a+b q=p+c", "a:3-30 b:2-30 c:2-30", [
        "{name} is {a} years old. {other} is {b} years older. Their teacher is {c} years older than {other}. "
        "How old is the teacher?",
        "A tree is {a} years old. The house is {b} years older and the bridge {c} years older than the house. "
        "How old is the bridge?",
        "{name} is {a} now and {other} is {b} years older than {name}. How old will {other} be in {c} years?"],
     ["The second age is @ years.", "The last age is @ years."]),
    ("walk", "p=a*b q=p+c", "a:2-12 b:2-12 c:2-40", [
        "{name} walks {a} miles a day for {b} days and then {c} miles more. How many miles does {he} walk?",
        "A boat goes {a} miles an hour for {b} hours. Then it goes {c} miles. How far does it go in all?",
        "{name} rides {b} times around a lake of {a} miles and then {c} miles home. How many miles is that?"],
     ["The first part is @ miles.", "With {c} more it is @ miles."]),
    ("wage", "p=a*b q=p-c", "a:2-12 b:2-12 c:2-60", [
        "{name} earns {a} dollars an hour and works {b} hours. {He} spends {c} dollars. "
        "How many dollars does {he} keep?",
        "For {b} days {name} gets {a} dollars a day. A ticket costs {c} dollars. How much is left after {he} buys one?",
        "{name} sold {b} {things} for {a} dollars each and paid {c} dollars for paint. What did {he} earn?"],
     ["{name} gets @ dollars.", "After paying {c} dollars, @ dollars are left."]),
    ("less_each_time", "p=a-b q=p-c", "a:10-120 b:2-50 c:2-50", [
        "{name} had {a} {things}, gave {b} to {other} and lost {c}. How many {things} does {he} have?",
        "A jar holds {a} {things}. On Monday {b} are eaten, on Tuesday {c}. How many {things} stay in the jar?",
        "Of {a} {things} on the shelf {name} takes {b} and {other} takes {c}. How many {things} are on the shelf now?"],
     ["After the first time there are @ {things}.", "After the second time there are @ {things}."]),
    # three steps
    ("two_purchases", "p=a*b q=c*d r=p+q", "a:2-12 b:2-10 c:2-12 d:2-10", [
        "{name} buys {a} {things} for {b} dollars each and {c} {items} for {d} dollars each. "
        "How many dollars does {he} pay?",
        "There are {a} {boxes} with {b} {things} and {c} {boxes} with {d} {things}. How many {things} are there?",
        "{name} makes {b} {things} a day for {a} days. {other} makes {d} a day for {c} days. "
        "How many {things} do they make?"],
     ["The first part is @.", "The second part is @.", "Both parts together are @."]),
    ("purchase_and_change", "p=a*b q=p+c r=d-q", "a:2-12 b:2-10 c:2-40 d:20-200", [
        "{name} buys {a} {things} for {b} dollars each and a book for {c} dollars. {He} had {d} dollars. "
        "How much is left?",
        "{name} has {d} dollars. {He} pays {c} dollars for a bag and buys {a} {things} at {b} dollars each. "
        "How many dollars does {he} have then?",
        "A meal costs {c} dollars and each of {a} drinks {b} dollars. {name} pays with {d} dollars. "
        "How much comes back?"],
     ["The {a} pieces cost @ dollars.", "With the other thing the cost is @ dollars.", "From {d} dollars @ are left."]),
    ("bus", "p=a-b q=p+c r=q-d", "a:8-80 b:2-40 c:2-40 d:2-50", [
        "A bus has {a} people. At the first stop {b} get off and {c} get on. At the next stop {d} get off. "
        "How many people are on the bus?",
        "{name} had {a} {things}. {He} sold {b}, bought {c} and then lost {d}. How many {things} does {he} have?",
        "In a pond there are {a} fish. {b} swim away, {c} come and {d} swim away. How many fish are in the pond?"],
     ["First @ are left.", "With {c} more there are @.", "In the end there are @."]),
    ("rows_then_pack", "p=a*b q=p-c r=q/d", "a:2-12 b:2-12 c:2-40 d:2-12", [
        "{name} plants {a} rows of {b} {things}. {c} of them die. The rest are put into {d} equal {boxes}. "
        "How many are in one {box}?",
        "{a} {boxes} hold {b} {things} each. {name} keeps {c} and splits the others among {d} friends. "
        "How many {things} does each friend get?",
        "{name} bakes {a} trays of {b} cookies. {He} eats {c}. {d} friends share the rest evenly. "
        "How many cookies does each get?"],
     ["At first there are @.", "Without {c} there are @.", "Each part has @."]),
    ("bake_then_pack", "p=a*b q=p+c r=q/d", "a:2-12 b:2-12 c:2-40 d:2-12", [
        "{name} bakes {a} trays of {b} muffins and {other} brings {c} more. They fill {d} {boxes} evenly. "
        "How many muffins go into each {box}?",
        "{name} has {a} {boxes} of {b} {things} and {c} loose ones. {He} gives all of them to {d} friends in equal "
        "parts. How many does each friend get?",
        "{a} children bring {b} {things} each and the teacher brings {c}. They make {d} equal groups of {things}. "
        "How many {things} are in a group?"],
     ["First there are @.", "With {c} more there are @.", "Each of the {d} parts has @."]),
    ("half", "p=a/2 q=p+b r=q-c", "a:8-120 b:2-50 c:2-50", [
        "{name} has {a} {things}. {He} gives half of them to {other}, then gets {b} and loses {c}. "
        "How many {things} does {name} have?",
        "Half of the {a} {things} in a {box} are sold. {b} new ones come in and {c} are given away. "
        "How many {things} are in the {box}?",
        "{name} read half of {a} pages last week. This week {he} read {b} pages, but {c} of all those were pictures. "
        "How many pages had words?"],
     ["Half is @.", "With {b} more it is @.", "Without {c} it is @."]),
    ("book_pages", "p=a*b q=p+c r=d-q", "a:2-12 b:2-12 c:2-40 d:30-200", [
        "A book has {d} pages. {name} reads {a} pages a day for {b} days and {c} pages on Sunday. "
        "How many pages are left?",
        "{name} wants {d} {things}. {He} makes {a} a day for {b} days, and {other} gives {him} {c}. "
        "How many {things} are missing?",
        "A road is {d} miles long. {name} drives {a} miles a day for {b} days, then {c} miles. "
        "How many miles are still to go?"],
     ["In the days that is @.", "With {c} more that is @.", "To reach {d}, @ are missing."]),
    ("teams", "p=a+b q=p-c r=q/d", "a:5-70 b:5-70 c:2-40 d:2-12", [
        "{a} girls and {b} boys come to a game. {c} of them only watch. The others form {d} equal teams. "
        "How many children are in a team?",
        "{name} has {a} {things} and gets {b} more. {He} keeps {c} and gives the rest to {d} friends evenly. "
        "How many does each friend get?",
        "A shop gets {a} {things} on Monday and {b} on Friday. {c} are bad. The good ones fill {d} {boxes} evenly. "
        "How many are in each {box}?"],
     ["There are @ at first.", "Without {c} there are @.", "Each of the {d} groups has @."]),
    ("compare", "p=a*b q=c*d r=p-q", "a:3-12 b:3-12 c:2-10 d:2-10", [
        "{name} has {a} {boxes} of {b} {things}. {other} has {c} {boxes} of {d} {things}. "
        "How many more {things} does {name} have?",
        "{name} works {a} hours for {b} dollars an hour. {other} works {c} hours for {d} dollars an hour. "
        "How many dollars more does {name} get?",
        "A wall has {a} rows of {b} bricks. A door takes away {c} rows of {d} bricks. "
        "How many bricks are in the wall?"],
     ["The larger one is @.", "The smaller one is @.", "The difference is @."]),
    ("twice_total", "p=a*2 q=a+p r=q-b", "a:4-45 b:2-60", [
        "{name} has {a} {things} and {other} has twice as many. Together they give away {b}. "
        "How many do they have left?",
        "On Monday {a} people come, on Tuesday twice as many. {b} of all of them are children. "
        "How many are not children?",
        "{name} picks {a} {things} and then twice that number. {He} sells {b} of all the {things}. "
        "How many does {he} keep?"],
     ["Twice {a} is @.", "Together that is @.", "Without {b} that is @."]),
    ("legs", "p=a*2 q=b*4 r=p+q", "a:2-30 b:2-12", [
        "A farm has {a} hens and {b} cows. A hen has 2 legs and a cow has 4. How many legs are there?",
        "{name} sees {a} bikes with 2 wheels and {b} cars with 4 wheels. How many wheels are that?",
        "{a} ducks with 2 feet and {b} dogs with 4 feet stand by the lake. How many feet stand there?"],
     ["The first ones have @.", "The others have @.", "All of them have @."]),
    ("saving", "p=a*b q=p+c r=q-d", "a:2-12 b:2-12 c:2-40 d:2-80", [
        "{name} saves {a} dollars a week for {b} weeks and gets {c} dollars as a gift. {He} spends {d} dollars. "
        "How much is left?",
        "{name} picks {a} {things} an hour for {b} hours. {other} adds {c}. They eat {d}. How many {things} are left?",
        "A shop buys {a} {boxes} of {b} {things} and has {c} from before. It sells {d}. "
        "How many {things} does the shop have?"],
     ["In all that time it is @.", "With {c} more it is @.", "After {d} are gone it is @."]),
    ("library", "p=a-b q=p+c r=q/d", "a:10-100 b:2-50 c:2-50 d:2-12", [
        "A library shelf has {a} books. {b} are lent and {c} come back. They now stand on {d} boards, the same number "
        "on "
        "each. How many books are on a board?",
        "{name} has {a} {things}, gives {b} away and finds {c}. {He} lays them in {d} equal rows. "
        "How many are in a row?",
        "There are {a} people at a party. {b} go home and {c} new ones come. They sit at {d} tables evenly. "
        "How many sit at one table?"],
     ["First @ stay.", "With {c} more there are @.", "In each of {d} equal parts there are @."]),
    ("one_costs_more", "p=a+b q=p*c r=q-d", "a:2-8 b:2-8 c:2-9 d:2-60", [
        "A {box} has {a} {things} and {b} {items}. {name} has {c} such {boxes} and takes out {d} pieces. "
        "How many pieces are left?",
        "A cup costs {a} dollars and a plate {b} dollars more. {name} buys {c} plates and gets {d} dollars off. "
        "What does {he} pay?",
        "Each day {name} runs {a} miles and {other} runs {b}. After {c} days, {d} of all their miles were in rain. "
        "How many miles were dry?"],
     ["For one that is @.", "For {c} that is @.", "Without {d} that is @."]),
    # four steps
    ("party", "p=a*b q=c*d r=p+q s=r-e", "a:2-10 b:2-10 c:2-10 d:2-10 e:2-80", [
        "{name} buys {a} {boxes} of {b} {things} and {c} {boxes} of {d} {things}. The guests use {e}. "
        "How many {things} are left?",
        "{name} plants {a} rows of {b} {things} and {other} plants {c} rows of {d}. {e} do not grow. How many grow?",
        "For a party {name} makes {a} plates with {b} {things} and {c} plates with {d}. {e} {things} are eaten. "
        "How many {things} are not eaten?"],
     ["The first ones are @.", "The second ones are @.", "Together they are @.", "Without {e} they are @."]),
    ("shopping_change", "p=a*b q=c*d r=p+q s=e-r", "a:2-10 b:2-10 c:2-10 d:2-10 e:20-200", [
        "{name} has {e} dollars and buys {a} {things} for {b} dollars each and {c} {items} for {d} dollars each. "
        "How much does {he} have left?",
        "A room has {e} seats. {a} rows of {b} and {c} rows of {d} are taken. How many seats are free?",
        "{name} needs {e} {things}. {He} gets {a} {boxes} of {b} and {c} {boxes} of {d}. "
        "How many {things} are missing?"],
     ["The first part is @.", "The second part is @.", "Both are @ together.", "From {e} there are @ left."]),
    ("less_times_more", "p=a-b q=p*c r=q+d s=r-e", "a:5-30 b:2-20 c:2-10 d:2-40 e:2-60", [
        "{name} has {a} {boxes} and gives {b} to {other}. Each {box} left holds {c} {things}. "
        "{He} buys {d} {things} and "
        "eats {e}. How many {things} does {he} have?",
        "Of {a} workers {b} are ill. Each of the others makes {c} {things}. With {d} old ones, {e} are sold. "
        "How many {things} are there then?",
        "{a} children are in a class and {b} stay home. Each child there brings {c} {things}. The teacher adds {d} and "
        "takes {e}. How many {things} are there?"],
     ["There are @ of them.", "They have @ {things}.", "With {d} more there are @.", "Without {e} there are @."]),
    ("pack_and_add", "p=a*b q=p-c r=q/d s=r+e", "a:2-12 b:2-12 c:2-40 d:2-12 e:2-30", [
        "{name} has {a} {boxes} of {b} {things}. {c} are bad. {He} shares the good ones among {d} friends. "
        "{other}, one of them, had {e} before. How many does {other} have now?",
        "A farm packs {a} rows of {b} plums. {c} are lost. The rest go into {d} equal bags, and {e} nuts go into each "
        "bag. How many pieces are in a bag?",
        "{name} earns {a} dollars an hour for {b} hours and spends {c}. {He} splits the rest with others in {d} equal "
        "parts. {He} had {e} dollars. How many dollars does {he} have now?"],
     ["At first it is @.", "Without {c} it is @.", "One part is @.", "With {e} more it is @."]),
    ("bus_then_cars", "p=a+b q=p-c r=q+d s=r/f", "a:5-60 b:5-60 c:2-50 d:2-40 f:2-12", [
        "{a} boys and {b} girls want to ride. {c} go home and {d} more come. They sit in {f} cars evenly. "
        "How many are in one car?",
        "{name} has {a} {things}, buys {b}, loses {c} and finds {d}. {He} puts them in {f} equal {boxes}. "
        "How many are in one {box}?",
        "On a shelf are {a} red and {b} blue {things}. {c} are sold and {d} are added. They make {f} equal rows. "
        "How many are in a row?"],
     ["First there are @.", "Without {c} there are @.", "With {d} more there are @.", "In one of {f} parts are @."]),
    ("twice_then_share", "p=a*2 q=p+b r=q-c s=r/d", "a:4-50 b:2-50 c:2-50 d:2-12", [
        "{name} had {a} {things} and now has twice as many. {other} brings {b}. "
        "They eat {c} and share the rest among {d} "
        "friends. How many does each friend get?",
        "{other} has twice as many {things} as {name}, who has {a}. {other} gets {b}, loses {c} and makes {d} equal "
        "groups. How many are in a group?",
        "A shop with {a} {things} gets twice that number of {items} and {b} more. It sells {c} {items}. "
        "The {items} left "
        "fill {d} {boxes} evenly. How many {items} are in a {box}?"],
     ["Twice {a} is @.", "With {b} more it is @.", "Without {c} it is @.", "Each of the {d} parts is @."]),
    ("share_then_times", "p=a/b q=p+c r=q*d s=r-e", "a:8-100 b:2-10 c:2-8 d:2-10 e:2-60", [
        "{a} {things} go into {b} {boxes} evenly, then {c} more into each {box}. {name} takes {d} of the {boxes} and "
        "eats {e} {things}. How many {things} does {he} have?",
        "{b} friends split {a} dollars evenly. Each also gets {c} dollars from home. {d} of them put their money "
        "together and spend {e} dollars. How many dollars are left?",
        "{name} walks {a} miles in {b} days, the same each day. Then {he} walks {c} miles a day more for {d} days, and "
        "{e} of those miles are in the dark. How many of them are in the light?"],
     ["One part is @.", "With {c} more it is @.", "For {d} that is @.", "Without {e} that is @."]),
    ("three_friends", "p=a+b q=p-c r=a+p s=r+q", "a:3-40 b:2-25 c:2-30", [
        "{name} has {a} {things}. {other} has {b} more than {name}, and Pia has {c} fewer than {other}. "
        "How many {things} do the three have?",
        "On day one {a} people came, on day two {b} more than on day one, on day three {c} fewer than on day two. "
        "How many came in all?",
        "A red rope is {a} feet long, a blue one {b} feet longer, and a green one {c} feet shorter than the blue one. "
        "How long are all the ropes together?"],
     ["The second one is @.", "The third one is @.", "The first two make @.", "All three make @."]),
]

# Held out from day one: none of these sentences may stand in STORIES or in any training text (tests check it).
HELDOUT_STORIES = [
    ("hall", "p=a*b q=p-c", "a:2-12 b:2-12 c:2-50", [
        "A hall is built with {a} rows and {b} seats per row. Tonight {c} seats stay empty. "
        "How many seats have a guest?",
        "Every one of the {a} shelves carries {b} {things}. {name} breaks {c} by mistake. "
        "How many whole {things} remain?"],
     ["In all rows that is @.", "Without {c} that is @."]),
    ("two_farmers", "p=a+b q=p/c", "a:3-60 b:3-60 c:2-12", [
        "Two farmers bring {a} and {b} {things} to the market. Their {things} fit into {c} {boxes} exactly, all alike. "
        "What does one {box} hold?",
        "After school {name} collects {a} {things}, after dinner {b}. In {c} days {he} uses them up, every day the "
        "same "
        "amount. How many {things} is that per day?"],
     ["Both make @ {things}.", "One part of {c} is @."]),
    ("tank", "p=a*b q=c-p", "a:2-12 b:2-12 c:10-200", [
        "A tank can take {c} cups of water. {name} pours in {a} cans with {b} cups per can. "
        "How many cups can still go in?",
        "The goal of the class is {c} {things}. So far {a} children have brought {b} apiece. "
        "How far away is the goal?"],
     ["So far it is @.", "Up to {c} there are @ to go."]),
    ("double_gift", "p=a+b q=p+c", "a:3-60 b:2-40 c:2-40", [
        "To the {a} {things} of {name}, {other} adds {b} and an aunt adds {c}. "
        "What is the number of {things} at the end?",
        "A clock shows that {a} minutes went by. Lunch takes {b} minutes and a nap {c}. "
        "How many minutes have gone by after that?"],
     ["After the first there are @.", "After the second there are @."]),
    ("game_points", "p=a*b q=c*d r=p+q", "a:2-12 b:2-10 c:2-12 d:2-10", [
        "In a game {name} hits {a} targets worth {b} points and {c} targets worth {d} points. "
        "What is the score of {name}?",
        "A train pulls {a} short cars with {b} seats and {c} long cars with {d} seats. Find the number of seats."],
     ["One kind gives @.", "The other kind gives @.", "The sum is @."]),
    ("trip_money", "p=a*b q=p+c r=d-q", "a:2-12 b:2-10 c:2-40 d:20-200", [
        "For a trip {name} took {d} dollars along. The hotel was {b} dollars a night, {a} nights long, and food came "
        "to {c} "
        "dollars. What did {he} bring home?",
        "From a rope of {d} feet {name} cuts {a} pieces of {b} feet and one piece of {c} feet. What length remains?"],
     ["The {a} of them take @.", "Together with {c} it is @.", "What remains of {d} is @."]),
    ("orchard", "p=a*b q=p-c r=q/d", "a:2-12 b:2-12 c:2-40 d:2-12", [
        "An orchard gives {a} loads, {b} {things} per load. Birds spoil {c}. "
        "What is left is divided fairly between {d} "
        "families. What does a family receive?",
        "With {a} prints of {b} photos {name} starts an album. {c} photos turn out dark and are left out. "
        "Every page shows "
        "{d} photos. How many pages are filled?"],
     ["To start with it is @.", "Less {c} it is @.", "Divided by {d} it is @."]),
    ("lift", "p=a-b q=p+c r=q-d", "a:8-80 b:2-40 c:2-40 d:2-50", [
        "When the ferry leaves, {a} cars are aboard. {b} roll off at the island, where {c} roll on. "
        "In the harbor {d} roll "
        "off. How many cars does the ferry carry now?",
        "The water stood at {a} inches. It fell by {b}, rose by {c} and fell by {d} again. "
        "At how many inches does it stand?"],
     ["After the fall it is @.", "After the rise it is @.", "At last it is @."]),
    ("choir", "p=a+b q=p-c r=q/d", "a:5-70 b:5-70 c:2-40 d:2-12", [
        "A choir of {a} singers joins one of {b} singers. {c} have a cold and cannot sing. "
        "The healthy ones line up in {d} "
        "lines of the same length. How long is a line?",
        "{name} mixes {a} red and {b} green beads, drops {c} and strings what is left on {d} threads, equally many on "
        "every "
        "thread. How many beads has a thread?"],
     ["Joined there are @.", "{c} less makes @.", "Each of {d} gets @."]),
    ("double_day", "p=a*2 q=a+p r=q-b", "a:4-45 b:2-60", [
        "The baker sells {a} rolls before noon and double that after noon. Of all those, {b} were dark rolls. "
        "How many were light rolls?",
        "{name} scores {a} points, and the partner of {name} doubles that. The judge then cancels {b} of their points. "
        "What score remains?"],
     ["Double is @.", "In sum it is @.", "Less {b} it is @."]),
    ("two_kinds_less", "p=a*b q=c*d r=p+q s=r-e", "a:2-10 b:2-10 c:2-10 d:2-10 e:2-80", [
        "A ship loads {a} piles with {b} {things} per pile, then {c} piles with {d} per pile. "
        "In a storm {e} fall into the "
        "sea. How many arrive?",
        "{a} times {name} throws {b} points, {c} times {d} points. A fault costs {e} points. "
        "Which score does {he} reach?"],
     ["The first kind gives @.", "The second kind gives @.", "The sum is @.", "Less {e} it is @."]),
    ("split_and_top_up", "p=a*b q=p-c r=q/d s=r+e", "a:2-12 b:2-12 c:2-40 d:2-12 e:2-30", [
        "{a} hens lay {b} eggs apiece. A fox steals {c}. The others are divided fairly between {d} nests, and into the "
        "first nest the farmer lays {e} old eggs. How many eggs has the first nest?",
        "{name} sews {a} shirts with {b} buttons. Later {c} buttons fall off. "
        "The remaining ones are moved to {d} coats, "
        "equally many to a coat, and every coat gets {e} extra. How many buttons has a coat?"],
     ["To start with it is @.", "Less {c} it is @.", "Divided by {d} it is @.", "And {e} on top is @."]),
]

# ---------------------------------------------------------------------------------------------------------------------
# A problem and its solutions


def apply(x, op, y):
    """x op y as a whole number of at least 0, or None where there is none."""
    if op == "/":
        return x // y if y and x % y == 0 else None
    result = {"+": x + y, "-": x - y, "*": x * y}[op]
    return result if result >= 0 else None


def easy_enough(x, op, y, result):
    """Whether a small model can do this step in its head; results 1 and below read badly ("1 apples")."""
    if result is None or not 2 <= result <= 200:
        return False
    if op == "*":  # the table to 12 x 12, and doubling or tripling of numbers to 33
        return min(x, y) >= 2 and (max(x, y) <= 12 or min(x, y) <= 3 and result <= 100)
    if op == "/":
        return y >= 2 and (y <= 12 and result <= 12 or y <= 3 and x <= 120)
    return True


@dataclass(frozen=True)
class Problem:
    """A question with its steps. `steps` holds (name, left, op, right); left and right are numbers or names of earlier
    steps. `sentences` holds one sentence a step, with "@" where the equation goes."""

    text: str
    family: str
    kind: str
    steps: tuple
    sentences: tuple

    @property
    def content(self):
        return f"{self.text}\n{INSTRUCTION}"

    @property
    def answer(self):
        return self.work()[-1][3]

    def work(self, slip=None):
        """(x, op, y, result) of every step. slip = (index, wrong result) is carried on through the later steps;
        None where that breaks one of them (a negative number, a division with a rest)."""
        known, rows = {}, []
        for i, (name, left, op, right) in enumerate(self.steps):
            x, y = known.get(left, left), known.get(right, right)
            result = apply(x, op, y)
            if result is None:
                return None
            known[name] = slip[1] if slip and slip[0] == i else result
            rows.append((x, op, y, known[name]))
        return rows

    def slip(self, rng):
        """The steps with exactly one wrong result, as a hurried pupil would make it, and a wrong answer."""
        right = self.work()
        for _ in range(40):
            i = rng.randrange(len(right))
            x, op, y, result = right[i]
            how = rng.choice(("near", "near", "carry", "operation"))
            if how == "near":
                wrong = result + rng.choice((-1, 1)) * rng.randint(1, 10)
            elif how == "carry" and op == "+" and x % 10 + y % 10 >= 10:
                wrong = result - 10
            elif how == "carry" and op == "-" and x % 10 < y % 10:
                wrong = result + 10
            elif how == "operation":
                wrong = apply(x, rng.choice("+-*/".replace(op, "")), y)
            else:
                continue
            if wrong is None or wrong == result or not 0 <= wrong <= 200:
                continue
            rows = self.work((i, wrong))
            if rows is not None and rows[-1][3] != self.answer and rows[-1][3] <= 400:
                return rows
        # A wrong last result breaks nothing that follows.
        return self.work((len(right) - 1, right[-1][3] + 1))

    def solution(self, style="terse", slip_rng=None):
        """A worked solution that ends in "#### N": terse (equations), verbose (sentences) or bare (the answer alone).
        With slip_rng, a random.Random, one equation is wrong and so is the answer."""
        rows = self.work() if slip_rng is None else self.slip(slip_rng)
        lines = [f"{x} {op} {y} = {result}" for x, op, y, result in rows]
        if style == "verbose":
            lines = [s.replace("@", line) for s, line in zip(self.sentences, lines, strict=True)]
        elif style == "bare":
            lines = []
        elif style != "terse":
            raise ValueError(f"style is {style!r}; use terse, verbose or bare")
        return "\n".join(lines + [f"#### {rows[-1][3]}"])


def parse_steps(spec):
    """ "p=a*b q=p-2" -> (("p", "a", "*", "b"), ("q", "p", "-", 2))"""
    steps = re.findall(r"(\w)=(\w+)([-+*/])(\w+)", spec)
    return tuple((n, *(int(v) if v.isdigit() else v for v in (left, op, right))) for n, left, op, right in steps)


def parse_ranges(spec):
    """ "a:2-12 b:3-9" -> [("a", 2, 12), ("b", 3, 9)]"""
    return [(name, int(lo), int(hi)) for name, lo, hi in re.findall(r"(\w):(\d+)-(\d+)", spec)]


def fill_steps(steps, numbers):
    """The steps with the given numbers in the place of their names."""
    return tuple((n, numbers.get(left, left), op, numbers.get(right, right)) for n, left, op, right in steps)


PARSED = {row[0]: (parse_steps(row[1]), parse_ranges(row[2])) for row in STORIES + HELDOUT_STORIES}

# ---------------------------------------------------------------------------------------------------------------------
# Same family: word problems


def story_problem(rng, stories=STORIES):
    """One word problem. Numbers are drawn until every step is easy enough."""
    kind, _, _, phrasings, sentences = rng.choice(stories)
    steps, ranges = PARSED[kind]
    while True:
        numbers = {name: rng.randint(lo, hi) for name, lo, hi in ranges}
        known = dict(numbers)
        for name, left, op, right in steps:
            x, y = known.get(left, left), known.get(right, right)
            known[name] = apply(x, op, y)
            if not easy_enough(x, op, y, known[name]):
                break
        else:
            break
    (name, he, his), (other, _, _) = rng.sample(NAMES, 2)
    things, items = rng.sample(THINGS, 2)
    box, boxes = rng.choice(BOXES)
    words = dict(numbers, name=name, other=other, he=he, He=he.capitalize(), his=his, things=things, items=items,
                 him="her" if he == "she" else "him", box=box, boxes=boxes)
    return Problem(rng.choice(phrasings).format(**words), "story", kind, fill_steps(steps, numbers),
                   tuple(s.format(**words) for s in sentences))


# ---------------------------------------------------------------------------------------------------------------------
# Different family: counting, calendar, ordering. Each function returns (phrasings, steps, numbers, sentences).


def ordinal(n):
    """1 -> 1st, 12 -> 12th, 23 -> 23rd"""
    return f"{n}{'th' if n // 10 % 10 == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def people(rng, count):
    return [name for name, _, _ in rng.sample(NAMES, count)]


def count_range(rng, easy):
    a = rng.randint(2, 10 if easy else 60)
    b = a + rng.randint(3, 10 if easy else 60)
    return ([f"How many whole numbers are there from {a} to {b}, both counted?",
             f"{people(rng, 1)[0]} counts aloud from {a} to {b}. How many numbers is that?",
             f"A ticket roll goes from number {a} to number {b}. How many tickets are on it?",
             f"You read from the top of page {a} to the end of page {b}. How many pages do you read?"],
            "p=b-a q=p+1", dict(a=a, b=b), ["The gap is @.", "Both ends count, so it is @."])


def count_even(rng, easy):
    a = 2 * rng.randint(1, 5 if easy else 20)
    b = a + 2 * rng.randint(2, 8 if easy else 25)
    kind = rng.choice(("even", "odd"))
    a, b = (a, b) if kind == "even" else (a + 1, b + 1)
    return ([f"How many {kind} numbers are there from {a} to {b}, both counted?",
             f"{people(rng, 1)[0]} writes all {kind} numbers from {a} to {b}. How many numbers is that?"],
            "p=b-a q=p/2 r=q+1", dict(a=a, b=b),
            ["The gap is @.", "There are @ jumps of two.", "The first one counts too: @."])


def count_multiples(rng, easy):
    m = rng.randint(2, 5 if easy else 12)
    top = rng.randint(2, 6 if easy else 12)
    n = m * top + rng.randint(0, m - 1)
    return ([f"How many multiples of {m} are there from 1 to {n}?",
             f"{people(rng, 1)[0]} counts from 1 to {n} and claps at each multiple of {m}. How many claps is that?",
             f"How many of the numbers from 1 to {n} can be divided by {m}?"],
            "p=c/m", dict(c=m * top, m=m), ["The last multiple tells the count: @."])


def count_multiples_between(rng, easy):
    m = rng.randint(2, 12)
    low, high = sorted(rng.sample(range(2, 13), 2))
    a, b = m * low - rng.randint(0, m - 1), m * high + rng.randint(0, m - 1)
    return ([f"How many multiples of {m} are there from {a} to {b}?",
             f"{people(rng, 1)[0]} counts from {a} to {b} and claps at each multiple of {m}. How many claps is that?"],
            "p=b/m q=a/m r=p-q", dict(m=m, a=m * (low - 1), b=m * high),
            ["Up to the end there are @.", "Before the start there are @.", "Between them there are @."])


def count_left(rng, easy):
    m = rng.randint(2, 5 if easy else 10)
    n = m * rng.randint(2, 5 if easy else 12)
    return ([f"{people(rng, 1)[0]} writes the numbers from 1 to {n} and crosses out the multiples of {m}. "
             "How many numbers are left?",
             f"{n} cards are numbered from 1 to {n}. Each {ordinal(m)} card is taken out. How many cards stay?"],
            "p=n/m q=n-p", dict(n=n, m=m), ["@ are crossed out.", "The others are @."])


def count_letters(rng, easy):
    words = rng.sample(WORDS, 2 if easy else 3)
    quoted = " and ".join(words) if easy else f"{words[0]}, {words[1]} and {words[2]}"
    return ([f"How many letters are in the words {quoted} together?",
             f"{people(rng, 1)[0]} writes {quoted} with letter stamps. How many letters does that take?",
             f"Count the letters of {quoted}. How many are there?"],
            "p=a+b" if easy else "p=a+b q=p+c", dict(zip("abc", map(len, words))),
            ["The first two words have @ letters.", "With the last word there are @ letters."])


def count_posts(rng, easy):
    gap = rng.randint(2, 5 if easy else 12)
    n = rng.randint(2, 6 if easy else 12)
    return ([f"Lamps stand every {gap} feet on a path of {gap * n} feet, with one at each end. "
             f"How many lamps are there?",
             f"A fence of {gap * n} feet has a post every {gap} feet and at both ends. How many posts does it have?",
             f"{people(rng, 1)[0]} plants a tree every {gap} steps on a line of {gap * n} steps, from end to end. "
             "How many trees is that?"],
            "p=n/g q=p+1", dict(n=gap * n, g=gap), ["There are @ gaps.", "There is one more than gaps: @."])


def count_digits(rng, easy):
    n = rng.randint(11, 20 if easy else 59)
    return ([f"How many digits do you write when you write the numbers from 1 to {n}?",
             f"{people(rng, 1)[0]} numbers the pages of a book from 1 to {n}. How many digits is that?"],
            "p=n-9 q=p*2 r=q+9", dict(n=n),
            ["@ numbers have two digits.", "They take @ digits.", "With the 9 small ones it is @."])


def date_after(rng, easy):
    month, length = rng.choice(list(MONTHS.items()))
    a = rng.randint(2, 15)
    b = rng.randint(2, min(10, length - a) if easy else length - a)
    return ([f"Today is {month} {a}. Which day of {month} is it in {b} days?",
             f"{people(rng, 1)[0]} leaves on {month} {a} and comes back {b} days later. "
             f"On which day of {month} is that?",
             f"A plant needs {b} days. It is put in the ground on {month} {a}. On which day of {month} is it ready?"],
            "p=a+b", dict(a=a, b=b), ["The day moves on to @."])


def date_next_month(rng, easy):
    months = list(MONTHS)
    i = rng.choice([i for i, m in enumerate(months[:-1]) if m != "January"])
    month, following, length = months[i], months[i + 1], MONTHS[months[i]]
    a = rng.randint(length - 14, length - 1)
    b = length - a + rng.randint(2, 8 if easy else 25)
    return ([f"{month} has {length} days. Today is {month} {a}. Which day of {following} is it in {b} days?",
             f"On {month} {a}, {people(rng, 1)[0]} starts a trip of {b} days. {month} has {length} days. "
             f"On which day of {following} does it end?"],
            "p=a+b q=p-c", dict(a=a, b=b, c=length),
            [f"Counted in {month} it is day @.", f"Without the days of {month} it is @."])


def days_between(rng, easy):
    month, length = rng.choice(list(MONTHS.items()))
    a = rng.randint(1, 15)
    b = a + rng.randint(2, 10 if easy else length - a)
    return ([f"How many days is it from {month} {a} to {month} {b}?",
             f"{people(rng, 1)[0]} waits from {month} {a} until {month} {b}. How many days later is that?",
             f"A letter sent on {month} {a} comes on {month} {b}. How many days did it take?"],
            "p=b-a", dict(a=a, b=b), ["The dates are apart by @ days."])


def weeks_and_days(rng, easy):
    a, b = rng.randint(2, 4 if easy else 12), rng.randint(2, 6)
    return ([f"How many days are {a} weeks and {b} days?",
             f"{people(rng, 1)[0]} is away for {a} weeks and {b} days. How many days is that?",
             f"It is {a} weeks and {b} days until the holidays. How many days is it?"],
            "p=a*7 q=p+b", dict(a=a, b=b), ["The weeks have @ days.", f"With {b} more it is @ days."])


def weekday(rng, easy):
    start, ahead = rng.randint(1, 7), rng.randint(3, 9 if easy else 30)
    if start + ahead <= 7:
        ahead += 7
    turns = (start + ahead - 1) // 7
    return ([f"Monday is day 1 and Sunday is day 7. Today is {WEEK[start - 1]}. "
             f"Which day number is it in {ahead} days?",
             f"Number the days from Monday, 1, to Sunday, 7. {people(rng, 1)[0]} was born on a {WEEK[start - 1]}. "
             f"What is the number of the day {ahead} days later?"],
            "p=a+b q=7*k r=p-q", dict(a=start, b=ahead, k=turns),
            ["Counting on gives @.", "Full weeks are @ days.", "What is left is @."])


def days_left(rng, easy):
    month, length = rng.choice(list(MONTHS.items()))
    a, b = rng.randint(3, 15), rng.randint(2, 8)
    return ([f"{month} has {length} days. After {month} {a}, {people(rng, 1)[0]} works {b} of the other days. "
             "On how many of them is there no work?",
             f"{month} has {length} days. It rains on {b} days after {month} {a}. "
             f"How many days after {month} {a} are dry?"],
            "p=c-a q=p-b", dict(a=a, b=b, c=length), ["After that day there are @ days.", "The others are @ days."])


def line_total(rng, easy):
    a, b = rng.randint(2, 9 if easy else 40), rng.randint(2, 9 if easy else 40)
    who = people(rng, 1)[0]
    return ([f"{who} is {ordinal(a)} from the front of a line and {ordinal(b)} from the back. "
             f"How many people are in it?",
             f"In a row of books one is {ordinal(a)} from the left and {ordinal(b)} from the right. "
             "How many books are in the row?",
             f"{who} came in {ordinal(a)} in a race, which was {ordinal(b)} from the last. How many ran?"],
            "p=a+b q=p-1", dict(a=a, b=b), ["Both places add to @.", "One is counted twice, so it is @."])


def line_back(rng, easy):
    n = rng.randint(6, 15 if easy else 80)
    a = rng.randint(2, n - 2)
    who = people(rng, 1)[0]
    return ([f"{n} people stand in a line. {who} is {ordinal(a)} from the front. Which place is that from the back?",
             f"{who} is number {a} from the top of a list with {n} names. Which number is that from the bottom?",
             f"Of {n} runners {who} came in {ordinal(a)}. Counted from the last one, which place is that?"],
            "p=n-a q=p+1", dict(n=n, a=a), ["After that one come @.", "Counted from there it is place @."])


def place_moves(rng, easy):
    a, b = rng.randint(8, 15 if easy else 50), rng.randint(2, 6)
    c = rng.randint(2, 5 if easy else 30)
    who = people(rng, 1)[0]
    return ([f"{who} is {ordinal(a)} in a race, passes {b} runners and is then passed by {c}. Which place is that?",
             f"In a line {who} is {ordinal(a)}. {b} people in front leave and {c} push in ahead. "
             f"What place has {who} now?"],
            "p=a-b q=p+c", dict(a=a, b=b, c=c), ["Going ahead gives place @.", "Falling back gives place @."])


def between_places(rng, easy):
    a = rng.randint(2, 9 if easy else 40)
    b = a + rng.randint(3, 9 if easy else 40)
    one, two = people(rng, 2)
    return ([f"{one} is {ordinal(a)} in line and {two} is {ordinal(b)}. How many people stand between them?",
             f"{one} has seat {a} and {two} has seat {b} in one row. How many seats are between them?"],
            "p=b-a q=p-1", dict(a=a, b=b), ["The places are apart by @.", "Between them are @."])


def height_rank(rng, easy):
    names = people(rng, 3 if easy else rng.randint(4, 5))
    facts = [f"{tall} is taller than {short}." for tall, short in zip(names, names[1:])]
    if not easy:
        rng.shuffle(facts)
    i = rng.randint(1, len(names) - 2) if len(names) > 2 else 0
    from_top = rng.random() < 0.5
    before = i if from_top else len(names) - 1 - i
    end = "tallest" if from_top else "shortest"
    return ([f"{' '.join(facts)} Counted from the {end}, which place has {names[i]}?",
             f"{' '.join(facts)} They stand in order from the {end}. Which place has {names[i]}?"],
            "p=a+1", dict(a=before), [f"Those before {names[i]} and one more give place @."])


def largest_smallest(rng, easy):
    numbers = rng.sample(range(2, 20 if easy else 100), 3 if easy else rng.randint(4, 5))
    low, high = min(numbers), max(numbers)
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    return ([f"Put {listed} in order. How much larger is the last number than the first?",
             f"The scores are {listed}. How far is the best from the worst?",
             f"What is the largest of {listed} minus the smallest?"],
            "p=b-a", dict(a=low, b=high), ["From the smallest to the largest it is @."])


# The functions of each area; the second list holds what --easy keeps.
DIFFERENT = {
    "counting": ([count_range, count_even, count_multiples, count_multiples_between, count_left, count_letters,
                  count_posts, count_digits], [count_range, count_multiples, count_letters, count_posts]),
    "calendar": ([date_after, date_next_month, days_between, weeks_and_days, weekday, days_left],
                 [date_after, days_between, weeks_and_days]),
    "ordering": ([line_total, line_back, place_moves, between_places, height_rank, largest_smallest],
                 [line_back, line_total, height_rank, largest_smallest]),
}


def different_problem(rng, easy=False):
    """One problem of counting, calendar or ordering; easy keeps the simpler kinds and small numbers."""
    family = rng.choice(tuple(DIFFERENT))
    make = rng.choice(DIFFERENT[family][easy])
    phrasings, spec, numbers, sentences = make(rng, easy)
    steps = fill_steps(parse_steps(spec), numbers)
    return Problem(rng.choice(phrasings), family, make.__name__, steps, tuple(sentences[:len(steps)]))


# ---------------------------------------------------------------------------------------------------------------------
# Splits and files


def normalise(text):
    """Lower case, everything but letters and digits folded to one space: what two problems are compared by."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).lower()).strip()


def split_of(problem):
    """The one split that may use this problem; the hint and the instruction do not count."""
    bucket = int(hashlib.sha256(normalise(problem.text).encode()).hexdigest(), 16) % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def draw(rng, make, split, count, seen=None):
    """`count` different problems of a split; make(rng) -> Problem. `seen` holds the normalised texts that are taken and
    grows. A ValueError when the kinds run out of new problems."""
    seen = set() if seen is None else seen
    problems, misses = [], 0
    while len(problems) < count:
        problem = make(rng)
        text = normalise(problem.text)
        if text in seen or split_of(problem) != split:
            misses += 1
            if misses > 4000:
                raise ValueError(f"only {len(problems)} of {count} different problems found for split {split}; "
                                 "ask for fewer")
            continue
        seen.add(text)
        problems.append(problem)
        misses = 0
    return problems


def row_of(problem, row_id):
    """The JSON object of a task file."""
    return {"id": row_id, "prompt": [{"role": "user", "content": problem.content}], "answer": str(problem.answer),
            "task": "arithmetic", "family": problem.family, "kind": problem.kind, "steps": len(problem.steps),
            "solution": problem.solution("terse")}


def write_jsonl(path, rows):
    """Writes the rows beside the file and moves them there in one step; returns the file's sha256."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that others cannot read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return hashlib.sha256(data).hexdigest()


def make_tasks(output_dir, seed=0, train=240, heldout=60, easy=False, quiet=False):
    """Writes the four files of a seed; returns {file name: {"rows", "sha256"}}."""
    # A stream of its own for each file, seeded by text (random.Random hashes it with sha512, the same everywhere):
    # the length of one file does not move another. All problems are made before the first file is written.
    plan = [("train", story_problem, "train", train),
            ("heldout-same", story_problem, "heldout", heldout),
            ("heldout-different", lambda rng: different_problem(rng, easy), "heldout", heldout),
            ("heldout-wording", lambda rng: story_problem(rng, HELDOUT_STORIES), "heldout", heldout)]
    files = {}
    for name, make, split, count in plan:
        problems = draw(random.Random(f"arithmetic {seed} {name}"), make, split, count)
        files[name] = [row_of(p, f"{name}-{i:05d}") for i, p in enumerate(problems)]
    written = {}
    for name, rows in files.items():
        path = Path(output_dir) / f"{name}.jsonl"
        written[path.name] = {"rows": len(rows), "sha256": write_jsonl(path, rows)}
        if not quiet:
            print(f"{path}: {len(rows)} rows, sha256 {written[path.name]['sha256']}")
    return written


def get_args(argv=None):
    parser = argparse.ArgumentParser(description="Makes the arithmetic tasks.", allow_abbrev=False)
    parser.add_argument("--output-dir", default="data/arithmetic", help="folder for the four files")
    parser.add_argument("--seed", type=int, default=0, help="seed, 0 or more; the same seed gives the same bytes")
    parser.add_argument("--train", type=int, default=240, help="problems to train on")
    parser.add_argument("--heldout", type=int, default=60, help="problems in each held-out file")
    parser.add_argument("--easy", action=argparse.BooleanOptionalAction, default=False,
                        help="a simpler heldout-different.jsonl: one or two steps, small numbers")
    args = parser.parse_args(argv)
    for flag, value, least in (("--seed", args.seed, 0), ("--train", args.train, 1), ("--heldout", args.heldout, 1)):
        if value < least:
            parser.error(f"{flag} is {value}; it must be {least} or more")
    return args


if __name__ == "__main__":
    args = get_args()
    try:
        make_tasks(args.output_dir, args.seed, args.train, args.heldout, args.easy)
    except (OSError, ValueError) as error:
        print(f"prepare.py: error: cannot make the tasks in {args.output_dir}: {error}", file=sys.stderr)
        sys.exit(2)
