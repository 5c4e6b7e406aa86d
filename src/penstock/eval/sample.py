"""A short text to measure on when nobody names a better one.

Written for this purpose, so no model has learnt it by heart. It is plain English of several kinds (a tale, talk, a
recipe, an explanation, a letter), and short: intervals are wide, and of a model of code or of another language it says
little.
"""

SAMPLE = """\
The Clockmaker's Well

In a valley between two dark hills there stood a village with a crooked tower, and in the tower lived an old
clockmaker who had never been late in her life. Every morning she wound the great clock, wiped her hands on her apron,
and went down ninety steps to fetch water from the well. The well was older than the village. Nobody knew who had dug
it, and nobody had ever heard a stone reach the bottom.

One autumn the rain did not come. The brook became a string of puddles, then a path of cracked mud, and the farmers
began to look at the sky as one looks at a man who owes one money. Only the well still gave water, and so the whole
village stood before it with pails and jugs, and pushed, and complained.

"It will run dry within the week," said the miller, who liked to be the first to know bad news.

"Then we should sell it by the cup," said his brother.

The clockmaker put down her pail. "How much water does a house need in a day?" she asked. They looked at one another,
because nobody had counted. So she sent the children from door to door with a slate. By evening she knew that there
were forty-one houses, that most of them needed three pails, that the baker needed nine, and that the miller's
brother, who washed his horse twice a day, used fourteen. She drew a large wheel on a board, divided it into forty-one
parts, and fixed a wooden hand to it that the great clock moved by a cord. Whoever had the hand before his name could
draw water; the others went home and did something useful.

There was grumbling, of course. But nobody pushed, nobody waited, and the well, which had been stirred into mud by so
many pails at once, grew clear again in the quiet between them. The rain came on the twelfth day. When the brook was
full the wheel was taken down, and the miller said that he had always been in favour of it.

A conversation at the station

"Excuse me, does this train stop at Harrow Lane?"

"Not on Sundays. You want the slow one, from the other side, in about twenty minutes."

"Twenty minutes! I was told there was one every ten."

"There is, on weekdays. Who told you?"

"A man with a green hat. He seemed very sure."

"He always does. He has never taken a train in his life; he only likes the waiting room, because it is heated. If you
are in a hurry, walk. It is a mile and a half along the canal, and you will be there before the train is."

"And if it rains?"

"Then you will be wet before the train is. Go under the bridge, past the yard where they mend boats, and turn left at
the chestnut tree. You cannot miss it: it is the only one that is still standing."

How to make a plain loaf

You need five hundred grams of flour, three hundred and twenty grams of water, ten grams of salt, and a small spoon of
dry yeast. Mix the flour with the water until no dry places are left, and let it rest for half an hour; this makes the
dough easier to handle than any amount of work would. Add the salt and the yeast, and fold the dough over itself a
dozen times. Cover it and leave it alone until it is twice as large. In a warm kitchen this takes two hours; in a cold
one it may take the night, and the bread will taste better for it.

Turn the dough out, fold the edges to the middle, and set it in a basket with the seam upwards. Heat the oven as far
as it goes, with an iron pot in it. After another hour, when a finger leaves a mark that comes back slowly, drop the
loaf into the pot, cut it once across the top, and bake it with the lid on for twenty-five minutes and with the lid
off for twenty more. Knock on the bottom: if it sounds hollow, it is done. Wait until it is cold before you cut it.
Hardly anybody does.

Why the moon changes its shape

The moon gives no light of its own. Half of it is always lit by the sun, as half of a ball is lit when it lies beside
a lamp, and the other half is dark. What changes is where we stand. When the moon is between us and the sun, its
bright side faces away, and we see nothing: that is the new moon. A week later we see it from the side, half bright
and half dark. After two weeks we stand between the two, and the whole bright side looks at us. It takes about
twenty-nine and a half days until everything begins again, and that is where our months come from, although they have
forgotten it.

People sometimes believe that the dark part is the shadow of the earth. It is not. The shadow of the earth falls on
the moon only a few times in a year, and then for an hour or two; this is called an eclipse. You can find out the
difference with an orange, a lamp, and your own head. Hold the orange at arm's length and turn round slowly on your
heel. As long as you do not stand in your own light, you will see every shape that the moon has, in the right order.

A letter

Dear Agnes,

Thank you for the parcel. The socks fit, the jam is already gone, and the book I am reading as slowly as I can,
because there are only two hundred pages of it and the winter here has many more. You ask whether I am lonely. In the
evenings, sometimes. But the light keeps me busy: the lamp has to be cleaned, the glass has to be polished, and every
ship that passes has to be written down with its name and the hour, even when there is nobody who will ever read the
list.

Last week there was fog for four days. I could not see the sea, though I heard it under me all the time, like somebody
breathing in the next room. On the fourth night a small boat came so near that I could make out two voices. One of
them said, "There it is, I told you," and the other one laughed. Then they were gone. I do not know who they were, and
they do not know that I heard them; still, I have thought of them every day since. It is a good thing to be looked for
in the fog, and a better one to be found.

Write soon, and tell me about the garden.

Your brother,
Thomas
"""
