"""Roles of a whole run: what cannot be is refused before anything starts; rewards by model; what a run remembers."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlcore.assets import TINY
from rlcore.config import ModelConfig, RoleConfig, compose
from rlcore.engine.reward_tokenizer import TextEncoder
from rlcore.errors import ConfigError, DataError, NoRoleError, PluginError
from rlcore.ops import masked_sum, needs, objective
from rlcore.plugins import CRITIC, REWARD, PluginManager, Role
from rlcore.protocol import DataProto
from rlcore.roles.handles import CriticHandle, RewardHandle
from rlcore.roles.settings import resolve_roles, role_config, with_settings
from rlcore.training.run import check_roles, open_run
from rlcore.training.trainer import train

CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}"


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """The folder of a reward model made of the tiny model and a random head; `labels` other than 1 is no such model."""
    made = {}

    def get(labels=1):
        if labels not in made:
            folder = tmp_path_factory.mktemp("scorer")
            shutil.copytree(TINY, folder, dirs_exist_ok=True)
            hf = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=labels, dtype=torch.float32)
            torch.manual_seed(0)
            torch.nn.init.normal_(hf.score.weight, std=0.1)
            hf.save_pretrained(folder)
            made[labels] = folder
        return made[labels]

    return get


@pytest.fixture(scope="module")
def foreign(scorer, tmp_path_factory):
    """The folder of a reward model that has a tokenizer of its own, of one token a character; with a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("foreign")
    shutil.copytree(scorer(), folder, dirs_exist_ok=True)
    characters = [chr(code) for code in range(32, 127)]
    words = Tokenizer(models.WordLevel({name: at for at, name in enumerate(["<pad>", "<unk>", *characters])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = CHAT
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config():
    return compose(["algo=grpo", "cluster=in_process", "rollout.response_len=5"], PluginManager.load())


@pytest.fixture
def open_roles(config, tmp_path):
    """Open a run with these roles and no reward but one that is never called."""
    from contextlib import ExitStack

    from rlcore.rewards.compose import resolve

    with ExitStack() as stack:

        def open_it(**roles):
            plugins = PluginManager.load()
            rewards = resolve(config.reward, "arithmetic", plugins.rewards())
            run = stack.enter_context(open_run(config, tmp_path, plugins, roles, rewards))
            run.begin_step(1)
            return run

        yield open_it


def texts(*pairs):
    """Return rows of prompt and response, as texts and as the tiny model's token ids."""
    from rlcore.data.chat import PromptEncoder, ResponseEncoder, load_tokenizer
    from rlcore.end_tokens import find_end_tokens
    from rlcore.protocol import Ragged

    tokenizer = load_tokenizer(ModelConfig())
    prompts, responses = (list(side) for side in zip(*pairs, strict=True))
    chat = PromptEncoder(tokenizer)
    ids = [torch.tensor(row) for row in chat.token_ids([chat.render(prompt) for prompt in prompts])]
    batch = DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list(ids),
            "prompt_text": prompts,
            "response_text": responses,
            "uid": [f"0:{row}" for row in range(len(pairs))],
        }
    )
    encoder = ResponseEncoder(tokenizer, 16, find_end_tokens(ModelConfig(), tokenizer))
    return batch.union(encoder.encode(batch, "response_text"))


PAIRS = [("3+4=", "7"), ("12+5=", "17orso"), ("1+1=", ""), ("9-2=", "7")]


# Refused before anything starts


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            {"tutor": Role(kind="critic")},
            r"role 'tutor' has kind='critic'; .* values POLICY, CRITIC, REWARD of",
        ),
        ({"reward": Role()}, "a role cannot be called 'reward': Run or cluster.pools uses that name"),
        ({"my-role": Role()}, "role name 'my-role' is not a Python identifier"),
        ({"critic": Role(kind=CRITIC, generates=True)}, "role 'critic' is a critic and cannot generate"),
        (
            {"cost": Role(kind=REWARD)},
            r"'cost' is a reward model that neither trains.*Role\(model=FOLDER\)",
        ),
        ({"critic": Role(kind=CRITIC)}, "'critic' is a critic that neither trains nor follows"),
        ({"actor": Role(), "ema": Role(follows="acter")}, "'ema' follows 'acter'.*can follow another one: actor"),
        ({"ema": Role(follows="ema")}, "'ema' follows 'ema'.*can follow another one: none"),
        ({"actor": Role(), "b": Role(trains=True, follows="actor")}, "a role that does not train can follow"),
        ({"actor": Role(), "v": Role(kind=CRITIC, follows="actor")}, "'v' is a critic and follows 'actor', a policy"),
        ({"grader": Role(model="/nowhere")}, "the model of role 'grader', /nowhere does not exist; give the folder"),
        (
            {"cost": Role(kind=REWARD, model="tiny")},
            r"tiny is not a trained reward model.*Qwen2ForCausalLM.*docs/roles.md",
        ),
        ({"critic": Role(kind=CRITIC, model="tiny")}, "tiny is not a trained critic"),
    ],
)
def test_roles_that_cannot_be(config, roles, message):
    with pytest.raises(ConfigError, match=message):
        check_roles(roles, config, PluginManager.load())


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize("role", [Role(kind=REWARD), Role(kind=CRITIC, trains=True)])
def test_a_model_with_another_number_of_labels(config, scorer, labels, role):
    with pytest.raises(ConfigError, match=rf"has {labels} labels; a {role.kind} needs .*one.*num_labels=1"):
        check_roles({"cost": replace(role, model=str(scorer(labels)))}, config, PluginManager.load())


def test_roles_that_read_token_ids_need_the_actors_tokenizer(config, foreign, tmp_path):
    check_roles({"cost": Role(kind=REWARD, model=str(foreign))}, config, PluginManager.load())
    for role in (Role(kind=REWARD, trains=True), Role(kind=CRITIC, trains=True)):
        with pytest.raises(ConfigError, match=r"reads the actor's token ids, but its tokenizer differs from"):
            check_roles({"cost": replace(role, model=str(foreign))}, config, PluginManager.load())
    shutil.copytree(TINY, tmp_path / "teacher")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "teacher" / name).unlink()
        if (foreign / name).exists():
            shutil.copy(foreign / name, tmp_path / "teacher" / name)
    with pytest.raises(ConfigError, match=r"the model of role 'teacher', .*differs from that of model\.path=tiny"):
        check_roles({"teacher": Role(model=str(tmp_path / "teacher"))}, config, PluginManager.load())
    (tmp_path / "teacher" / "tokenizer.json").unlink()
    (tmp_path / "teacher" / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer; looked for tokenizer\.json"):
        check_roles({"teacher": Role(model=str(tmp_path / "teacher"))}, config, PluginManager.load())


def test_the_reward_model_of_the_config_is_checked_by_its_key(config, scorer, tmp_path):
    def roles(model):
        asked = replace(config, reward=replace(config.reward, model=str(model)))
        check_roles(resolve_roles({"actor": Role()}, asked), asked, PluginManager.load())

    roles(scorer())
    with pytest.raises(ConfigError, match=r"^reward\.model=/nowhere does not exist; .* Face sequence-classification"):
        roles("/nowhere")
    with pytest.raises(ConfigError, match=r"^reward\.model=.* has 2 labels"):
        roles(scorer(2))
    shutil.copytree(scorer(), tmp_path / "bare")  # as a model that was saved without its tokenizer
    for file in [*(tmp_path / "bare").glob("tokenizer*")]:
        file.unlink()
    with pytest.raises(ConfigError, match=r"^reward\.model=.*/bare holds no tokenizer"):
        roles(tmp_path / "bare")
    asked = replace(config, reward=replace(config.reward, model=str(scorer())))
    with pytest.raises(ConfigError, match=r"has its own role 'reward_model'; leave out reward.model"):
        resolve_roles({"reward_model": Role(trains=True, kind=REWARD)}, asked)


# Roles by name


@needs("values")
def value_loss(out, batch, config):
    return {"value": objective(masked_sum((out.values - 1) ** 2, batch["response_mask"]), batch["response_mask"].sum())}


def likelihood(out, batch, config):
    return {"nll": objective(-masked_sum(out.log_probs, batch["response_mask"]), batch["response_mask"].sum())}


@pytest.fixture
def many(open_roles, scorer):
    return open_roles(
        actor=Role(trains=True, generates=True, lr=1e-2),
        rival=Role(generates=True),
        teacher=Role(model="tiny"),
        helpful=Role(kind=REWARD, model=str(scorer())),
        cost=Role(kind=REWARD, trains=True),
        critic=Role(trains=True, kind=CRITIC, model=str(scorer()), lr=0.0),
        ema=Role(follows="actor"),
    )


def test_two_actors_two_reward_models_a_teacher_and_a_critic_in_one_run(many):
    batch = texts(*PAIRS)
    before = many.teacher.log_probs(batch)["log_probs"]
    metrics = many.actor.update(batch, loss=likelihood)
    assert metrics["train/lr"] == 1e-2
    assert many.teacher.log_probs(batch)["log_probs"].equal(before)
    assert not many.actor.log_probs(batch)["log_probs"].equal(before)
    for name, role in (("helpful", many.helpful), ("cost", many.cost)):
        batch = batch.union(role.score(batch, name=f"{name}_scores"))
    assert batch["helpful_scores"].any()
    assert not batch["cost_scores"].any()  # a new head is zero
    values = many.critic.values(batch)["values"]
    assert values.values.any()  # the head of the reward model that it started from
    assert many.critic.update(batch, loss=value_loss)["train/lr"] == 0.0
    assert many.critic.values(batch)["values"].equal(values)
    prompts = batch.select(["prompts"], ["uid"], [])
    assert many.rival.generate(prompts)["weights_version"].tolist() == [0] * 4
    assert many.actor.generate(prompts)["weights_version"].tolist() == [1] * 4
    assert many.ema.log_probs(batch)["log_probs"].equal(before)
    many.ema.follow(1.0)
    assert many.ema.log_probs(batch)["log_probs"].equal(many.actor.log_probs(batch)["log_probs"])
    copied = many.ema.log_probs(batch)["log_probs"]
    many.ema.follow(0.0)
    assert many.ema.log_probs(batch)["log_probs"].equal(copied)


def test_a_call_that_a_role_cannot_answer_says_why(many):
    batch = texts(*PAIRS)
    with pytest.raises(NoRoleError, match=r"no role 'tutor'.*algorithm's roles\(\) declares actor, rival, teacher,"):
        many.tutor.log_probs(batch)
    assert issubclass(NoRoleError, PluginError)  # the command line prints it without a traceback
    assert not hasattr(many, "tutor")
    with pytest.raises(NoRoleError, match=r"no role 'critics'. Did you mean 'critic'\?"):
        many.critics.values(batch)
    with pytest.raises(NoRoleError, match=r"role 'actor' is a policy, which has no values\(\).*Role\(kind=CRITIC\)"):
        many.actor.values(batch)
    with pytest.raises(NoRoleError, match=r"role 'critic' is a critic, which has no log_probs\(\)"):
        many.critic.log_probs(batch)
    with pytest.raises(NoRoleError, match=r"role 'critic' is a critic, which has no score\(\).*Role\(kind=REWARD\)"):
        many.critic.score(batch)
    with pytest.raises(NoRoleError, match=r"role 'actor' is a policy, which has no genrate.*Did you mean 'generate'"):
        many.actor.genrate(batch)
    assert not hasattr(many.actor, "values")
    assert many.role("cost", RewardHandle) is many.cost
    with pytest.raises(
        NoRoleError, match=r"role 'cost' is a reward model.* not a CriticHandle; .*'cost', RewardHandle\)"
    ):
        many.role("cost", CriticHandle)
    with pytest.raises(NoRoleError, match=r"this run has no role 'costs'\. Did you mean 'cost'"):
        many.role("costs", RewardHandle)
    with pytest.raises(DataError, match=r"'value_loss' needs values, but role 'actor' is a policy, which gives log_pr"):
        many.actor.update(batch, loss=value_loss)
    with pytest.raises(DataError, match=r"'likelihood' needs log_probs, but role 'cost' is a reward model, which"):
        many.cost.update(batch, loss=likelihood)
    with pytest.raises(DataError, match=r"role 'rival' follows no other"):
        many.rival.follow()
    with pytest.raises(DataError, match=r"ema\.follow\(1\.5\): tau must be from 0 to 1"):
        many.ema.follow(1.5)
    with pytest.raises(DataError, match=r"cost\.score\(\) reads prompts, responses; the batch lacks responses"):
        many.cost.score(batch.select(["prompts"], ["uid"], []))


def test_no_rows_at_all(many):
    batch = texts(*PAIRS)[:0]
    assert len(many.critic.values(batch)["values"]) == 0
    assert many.cost.score(batch)["scores"].shape == (0,)
    assert many.critic.update(batch, loss=value_loss)["train/skipped_updates"] == 1


# Another tokenizer


def test_a_chat_template_of_its_own_or_plain_text(foreign, tmp_path):
    def characters(encoder, *pair, **columns):
        batch = DataProto.from_single_dict({"prompt_text": [pair[0]], "response_text": [pair[1]], **columns})
        encoded = encoder.encode(batch)
        assert encoded["responses"].lengths.tolist() == [0]
        return "".join(encoder.tokenizer.convert_ids_to_tokens(encoded["prompts"].to_list()[0]))

    encoder = TextEncoder.of(ModelConfig(path=str(foreign)))
    assert characters(encoder, "3+4=", "7") == "[user]3+4=;[assistant]7;"
    special = encoder.tokenizer.all_special_tokens[0]
    assert (
        encoder.tokenizer.convert_tokens_to_ids(special)
        not in encoder.encode(DataProto.from_single_dict({"prompt_text": ["1"], "response_text": [f"2{special}"]}))[
            "prompts"
        ]
        .to_list()[0]
        .tolist()
    )
    assert characters(encoder, "1", f"2{special}") == f"[user]1;[assistant]2{special};"
    said = [{"role": "system", "content": "Add!"}, {"role": "user", "content": "1+1="}]
    messages = DataProto.from_dict({}, {"prompt_messages": [said, None]})["prompt_messages"][:1]
    assert characters(encoder, "as the actor's template has it", "2", prompt_messages=messages) == (
        "[system]Add!;[user]1+1=;[assistant]2;"
    )
    encoder.tokenizer.chat_template = None
    assert characters(encoder, "3+4=", f"7{special}") == f"3+4=7{special}"
    with pytest.raises(DataError, match="gives no token for the text ''"):
        characters(encoder, "", "")
    encoder.tokenizer.chat_template = "{{ raise_exception('only poems') }}"
    with pytest.raises(DataError, match=r"the reward model's chat template refuses .*3\+4=.*: only poems"):
        characters(encoder, "3+4=", "7")


def test_a_reward_model_with_another_tokenizer_has_its_own_template_arguments(config, foreign, scorer, tmp_path):
    shutil.copytree(foreign, tmp_path / "toned")
    (tmp_path / "toned" / "chat_template.jinja").write_text("{{ tone }}" + CHAT)
    roles = {"cost": Role(kind=REWARD, model=str(tmp_path / "toned")), "own": Role(kind=REWARD, model=str(scorer()))}
    # The run's arguments are for the actor's template, and the reward model's may not know them.
    config = replace(config, model=replace(config.model, chat_template_kwargs={"tone": "run"}))

    def chosen(name, **given):
        asked = replace(config, roles={name: RoleConfig(chat_template_kwargs=given)})
        check_roles(with_settings(roles, asked), asked, PluginManager.load())
        return role_config(asked, name, roles[name]).model

    batch = DataProto.from_single_dict({"prompt_text": ["3+4="], "response_text": ["7"]})
    for given in ({"tone": "mild"}, {}):
        encoder = TextEncoder.of(chosen("cost", **given))
        ids = encoder.encode(batch)["prompts"].to_list()[0]
        text = "".join(encoder.tokenizer.convert_ids_to_tokens(ids))
        assert text == f"{given.get('tone', '')}[user]3+4=;[assistant]7;"
    assert role_config(config, "actor", Role()).model.chat_template_kwargs == {"tone": "run"}
    with pytest.raises(
        ConfigError, match=r"^roles\.cost\.chat_template_kwargs=.* has 'x': .* never reads it; it reads tone"
    ):
        chosen("cost", x=1)
    with pytest.raises(
        ConfigError, match=r"^roles\.own\.chat_template_kwargs=.*: this role reads the actor's token ids"
    ):
        chosen("own", tone=1)


def test_a_reward_model_with_another_tokenizer_reads_the_texts(open_roles, foreign, scorer):
    """By hand: each chat alone through transformers, one token a character. Token ids are not looked at."""
    run = open_roles(own=Role(kind=REWARD, model=str(scorer())), other=Role(kind=REWARD, model=str(foreign)))
    batch = texts(*PAIRS)
    hf = AutoModelForSequenceClassification.from_pretrained(foreign, dtype=torch.float32).eval()
    expected = []
    for prompt, response in PAIRS:
        ids = [ord(character) - 30 for character in f"[user]{prompt};[assistant]{response};"]
        expected.append(hf(input_ids=torch.tensor([ids])).logits.item())
    scores = run.other.score(batch)["scores"]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert run.other.score(batch.select([], ["prompt_text", "response_text"], []))["scores"].equal(scores)
    assert not torch.allclose(run.own.score(batch)["scores"], scores, atol=1e-3)
    with pytest.raises(DataError, match=r"other\.score\(\) reads prompt_text, response_text; the batch lacks respo"):
        run.other.score(batch.select(["prompts", "responses"], ["prompt_text"], []))
    assert run.other.score(batch[:0])["scores"].shape == (0,)


# reward.model


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_grpo_with_a_reward_model_alone_and_with_functions(small, samples_of, metrics_of, scorer, tmp_path):
    plugins = PluginManager.load()
    options = [option for option in small if option != "reward=arithmetic"]

    def run(name, *overrides):
        return train(compose([*options, f"run.dir={tmp_path / name}", *overrides], plugins), plugins)

    options += ["algo=grpo", "algo.group_size=2", "algo.kl_coef=0", "trainer.total_steps=1", f"reward.model={scorer()}"]
    options += ["reward.model_weight=0.5", "trainer.eval_every=1", "data.max_rows=128", "data.eval_size=4"]
    alone, both = run("alone"), run("both", "reward.functions={math: 2}")
    hf = AutoModelForSequenceClassification.from_pretrained(scorer(), dtype=torch.float32).eval()
    by_model, summed = samples_of(tmp_path / "alone")[1], samples_of(tmp_path / "both")[1]
    assert [row["response_text"] for row in by_model] == [row["response_text"] for row in summed]
    for row, other in zip(by_model, summed, strict=True):
        raw = other["score/model"]
        assert row["scores"] == pytest.approx(0.5 * raw, abs=1e-6)
        assert other["scores"] - 0.5 * raw == pytest.approx(2 * other["score/math"], abs=1e-6)
        if len(row["response_text"]) < 4:  # it ended, so its tokens are those of the text and <|end|>
            batch = texts((row["prompt_text"], row["response_text"]))
            ids = torch.cat([batch["prompts"].values, batch["responses"].values])
            assert raw == pytest.approx(hf(input_ids=ids[None]).logits.item(), abs=1e-4)
    assert not any("score/model" in row for row in by_model)
    # Both begin with the same weights, and an evaluation is counted by the data set's own function.
    assert alone["accuracy_before"] is not None
    first = [metrics_of(tmp_path / name)[0] for name in ("alone", "both")]
    assert 2 * first[0]["eval/score"] == first[1]["eval/score"]
    assert metrics_of(tmp_path / "both")[1]["reward/model"] == pytest.approx(
        sum(row["score/model"] for row in summed) / len(summed), abs=1e-5
    )
    assert both["status"] == "finished"


# What a run remembers

FOLLOWING = """
from dataclasses import dataclass

from rlcore import CRITIC, Algorithm, AlgorithmSpec, Role, hookimpl
from rlcore.ops import masked_sum, needs, objective

RLCORE_API = 1

@dataclass(frozen=True)
class Settings:
    pass

def policy(out, batch, config):
    gain = batch["scores"][:, None] - 0.4
    mask = batch["response_mask"]
    return {"policy": objective(-masked_sum(out.log_probs * gain, mask), mask.sum())}

@needs("values")
def value(out, batch, config):
    error = (out.values - batch["scores"][:, None]) ** 2
    return {"value": objective(masked_sum(error, batch["response_mask"]), batch["response_mask"].sum())}

class Following(Algorithm):
    config_class = Settings

    def roles(self):
        return {
            "actor": Role(trains=True, generates=True),
            "critic": Role(trains=True, kind=CRITIC, lr=1e-3),
            "average": Role(follows="actor"),
            "target": Role(kind=CRITIC, follows="critic"),
        }

    def step(self, run, prompts):
        batch = run.actor.generate(prompts.repeat(2))
        batch = batch.union(run.reward(batch))
        far = (run.average.log_probs(batch)["log_probs"].values - batch["rollout_log_probs"].values).abs().mean()
        run.log(far=float(far), target=float(run.target.values(batch)["values"].values.sum()))
        metrics = run.critic.update(batch, loss=value) | run.actor.update(batch, loss=policy)
        run.average.follow(0.25)
        run.target.follow(0.5)
        return metrics

@hookimpl
def rlcore_algorithm():
    return AlgorithmSpec("following", Following)
"""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_critics_and_followers_go_on_where_they_were(train_small, metrics_of, tmp_path):
    class StopsAtTwo(PluginManager):
        def step_end(self, run, step, metrics):
            super().step_end(run, step, metrics)
            if step == 2:
                raise KeyboardInterrupt

    (tmp_path / "following.py").write_text(FOLLOWING)
    options = ["algo=following", "trainer.total_steps=3", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=0"]
    load = [str(tmp_path / "following.py")]
    train_small(tmp_path / "straight", *options, plugins=PluginManager.load(load))
    with pytest.raises(KeyboardInterrupt):
        train_small(tmp_path / "resumed", *options, plugins=StopsAtTwo.load(load))
    saved = tmp_path / "resumed" / "checkpoints" / "step_00000001"
    assert {path.name for path in saved.iterdir()} == {
        *("actor", "critic", "average", "target", "trainer.json", "manifest.json")
    }
    train_small(tmp_path / "resumed", *options, plugins=PluginManager.load(load))
    metrics = metrics_of(tmp_path / "resumed")
    assert metrics == metrics_of(tmp_path / "straight")
    assert metrics[0]["far"] == pytest.approx(0, abs=1e-4)
    assert metrics[1]["far"] > 1e-4
    assert metrics[0]["target"] == 0
    assert metrics[2]["target"] != metrics[1]["target"] != 0
    architectures = json.loads((saved / "target" / "model" / "config.json").read_text())["architectures"]
    assert architectures == ["Qwen2ForSequenceClassification"]
