"""A scheduling policy of your own, on real tokens: nobody may wait behind a long prompt.

    python my_policy.py
    penstock serve --plugin my_policy.py --scheduling-policy shortest

docs/tutorials/add-a-policy.md tries the same idea in the simulator first; docs/guides/add-a-policy.md puts it into the
package, where no plugin is needed.
"""

from penstock import LLM, SamplingParams
from penstock.sched.policy import POLICIES
from penstock.sched.policy.fcfs import Fcfs


class Shortest(Fcfs):
    """The shortest prompt first among those waiting."""

    name = "shortest"

    def order(self, running, waiting):
        return super().order(running, sorted(waiting, key=lambda s: (s.num_known, s.arrival, s.index)))


POLICIES.add("shortest", f"{__name__}:Shortest")

if __name__ == "__main__":
    prompts = ["Once upon a time " * n for n in (40, 1, 20)]
    texts = []
    for policy in ("fcfs", "shortest"):
        llm = LLM("nano", scheduling_policy=policy, max_num_seqs=1)
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
        order = sorted(range(3), key=lambda i: outs[i].metrics.first_token_s)
        print(f"{policy}: prompts were answered in the order {order}")
        texts.append([out.outputs[0].text for out in outs])
    print("same texts:", texts[0] == texts[1])
