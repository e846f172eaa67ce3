"""The rules of boids, trash_pickup and moba."""

import numpy as np
import pytest
from ocean_vector import Vector

import ocean


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("boids", {"vision": 300.0}, "at most a third"),
        ("boids", {"min_speed": 9.0}, "min_speed <= max_speed"),
        ("boids", {"neighbours": 17}, "neighbours must lie within"),
        ("trash_pickup", {"num_bins": 5, "width": 5, "height": 5}, "num_bins must lie within"),
        ("trash_pickup", {"num_trash": 391}, "no more than the cells"),
        ("moba", {"bot_range": 0.5, "bot_skill": 0.4}, "bot_range must lie within"),
        ("moba", {"respawn": 0}, "respawn must lie within"),
    ],
)
def test_wrong_settings(name, options, message):
    with pytest.raises(ValueError, match=message):
        ocean.load(name).create(1, settings=options)


# Boids


def boid_neighbours(observations):
    """(n, k, 5) closeness, way (2), velocity (2); and who is there (n, k)."""
    near = observations[:, 6:].reshape(len(observations), -1, 5).astype(np.float64)
    return near, np.abs(near).max(axis=2) > 0


def test_boids_see_each_other_and_the_nearest_first():
    """With room for all, sight is mutual and agrees in distance; with room for three it is the
    first three of these."""
    world = {"num_agents": 17, "width": 330.0, "height": 300.0}
    wide, narrow = Vector("boids", 4, {**world, "neighbours": 16}), Vector("boids", 4, {**world, "neighbours": 3})
    rng, pairs = np.random.default_rng(1), 0
    for _ in range(200):
        near, there = boid_neighbours(wide.observations)
        first, _ = boid_neighbours(narrow.observations)
        assert np.array_equal(near[:, :3], first)
        assert (np.diff(near[..., 0], axis=1) <= 0).all()
        distance = np.hypot(near[..., 1], near[..., 2])
        np.testing.assert_allclose(distance[there], 1 - near[..., 0][there], atol=1e-5)
        np.testing.assert_allclose(wide.observations[:, 1], there.sum(axis=1) / 16)
        np.testing.assert_allclose(narrow.observations[:, 1],
                                   np.minimum(there.sum(axis=1), 3) / 3, rtol=1e-6)
        for world_index in range(4):
            part = slice(17 * world_index, 17 * world_index + 17)
            seen = np.sort(distance[part][there[part]])
            assert len(seen) % 2 == 0
            np.testing.assert_allclose(seen[::2], seen[1::2], atol=1e-5)  # each distance twice
        pairs += there.sum() / 2
        wide.random_actions(rng)
        narrow.actions[:] = wide.actions
        wide.step()
        narrow.step()
    # A disc of radius 100 in 330 x 300.
    expected = np.pi * 100**2 / (330 * 300) * (17 * 16 / 2) * 4 * 200
    assert pairs == pytest.approx(expected, rel=0.05)


def test_boids_are_paid_for_what_they_see():
    options = {"width": 400.0, "height": 300.0, "alignment_weight": 0.3, "cohesion_weight": 0.9,
               "separation_weight": 2.0, "reward_scale": 1.0, "max_steps": 10**6}
    vector, rng, crowded = Vector("boids", 2, options), np.random.default_rng(2), 0
    for _ in range(100):
        vector.random_actions(rng)
        vector.step()
        near, there = boid_neighbours(vector.observations)
        own = vector.observations[:, :1].astype(np.float64) * 8
        velocity = near[..., 3:5] * 16 + np.stack([own, 0 * own], axis=2)
        cosine = velocity[..., 0] / np.maximum(np.hypot(velocity[..., 0], velocity[..., 1]), 1e-9)
        count = there.sum(axis=1)
        alignment = (cosine * there).sum(axis=1) / 7
        centre = near[..., 1:3].sum(axis=1) / np.maximum(count, 1)[:, None]
        cohesion = count / 7 * (1 - np.hypot(centre[:, 0], centre[:, 1]))
        crowding = np.where(count, np.maximum(1 - (1 - near[:, 0, 0]) * 100 / 24, 0), 0)
        np.testing.assert_allclose(vector.rewards,
                                   0.3 * alignment + 0.9 * cohesion - 2 * crowding, atol=2e-4)
        np.testing.assert_allclose(vector.observations[:, 2:4], centre, atol=1e-5)
        crowded += (crowding > 0).sum()
    assert crowded > 1000


def test_boids_fly_as_they_are_told():
    """Two of them: what one sees of the other moves as both of them steer,
    across the joined edges too."""
    options = {"num_agents": 2, "neighbours": 1, "width": 300.0, "height": 300.0,
               "continuous": True, "max_steps": 10**6}
    vector, rng, seen = Vector("boids", 64, options), np.random.default_rng(3), 0
    for _ in range(150):
        before = vector.observations.astype(np.float64)
        actions = rng.uniform(-1.5, 1.5, (128, 2))
        vector.step(actions)
        after = vector.observations.astype(np.float64)
        told = np.clip(actions, -1, 1)
        speed = np.clip(before[:, 0] * 8 + told[:, 1], 2, 8)
        np.testing.assert_allclose(after[:, 0] * 8, speed, atol=1e-5)
        both = (before[:, 6] > 0) & (after[:, 6] > 0)
        # of the other, before
        velocity = before[:, 9:11] * 16 + np.stack([before[:, 0] * 8, 0 * speed], axis=1)
        swap = np.arange(128) ^ 1
        bend = told[swap, 0] * 0.2
        unit = velocity / np.maximum(np.hypot(*velocity.T), 1e-9)[:, None]
        cosine, sine = np.cos(bend), np.sin(bend)
        flown = np.stack([unit[:, 0] * cosine - unit[:, 1] * sine, unit[:, 0] * sine + unit[:, 1] * cosine], axis=1)
        flown *= speed[swap, None]
        turn = told[:, 0] * 0.2
        own = np.stack([np.cos(turn), np.sin(turn)], axis=1)
        way = before[:, 7:9] * 100 + flown - own * speed[:, None]
        turned = np.stack([(way * own).sum(axis=1), way[:, 1] * own[:, 0] - way[:, 0] * own[:, 1]],
                          axis=1)
        np.testing.assert_allclose(after[both, 7:9] * 100, turned[both], atol=2e-2)
        seen += both.sum()
    assert seen > 1000


def boid_steering(observations):
    """Reynolds's three rules: keep away from the crowding, fly as they do, fly to their middle."""
    near, there = boid_neighbours(observations)
    crowd = np.maximum(1 - (1 - near[..., 0]) * 100 / 30, 0) * there
    away = (near[..., 1:3] / np.maximum(1 - near[..., 0], 1e-3)[..., None]
            * crowd[..., None]).sum(axis=1)
    way = 2 * observations[:, 4:6] + 0.5 * observations[:, 2:4] - 3 * away + [0.3, 0]
    faster = 16 * observations[:, 4] + 2 * observations[:, 2]
    return np.clip(np.column_stack([np.arctan2(way[:, 1], way[:, 0]) / 0.2, faster]), -1, 1)


def test_boids_flock_by_the_three_rules():
    scores = []
    for policy in (boid_steering, lambda o: np.random.default_rng(4).uniform(-1, 1, (len(o), 2))):
        vector = Vector("boids", 8, {"continuous": True})
        starts = [bool(vector.step(policy(vector.observations)).truncations[0]) for _ in range(512)]
        assert sum(starts) == 1 and vector.envs.log() == {}  # the first episode was cut short
        for _ in range(512):
            vector.step(policy(vector.observations))
        log = vector.envs.log()
        assert log["n"] == 8 and log["episode_length"] == 512
        assert log["perf"] == pytest.approx(max(log["score"], 0), abs=1e-3)
        assert log["episode_return"] == pytest.approx(51.2 * log["score"], rel=1e-4)
        assert log["score"] == pytest.approx(0.5 * log["alignment"] + 0.5 * log["cohesion"]
                                             - log["crowding"], abs=1e-4)
        scores.append(log["score"])
    assert scores[0] > 0.7 and scores[1] < 0.15


# Trash pickup


class Trash(Vector):
    """Fields of at most 9 cells a side, of which each agent sees all."""

    def __init__(self, num_envs, **options):
        self.size = options["height"], options["width"]
        super().__init__("trash_pickup", num_envs, {"vision": 8, **options}, seed=5)
        self.each = self.envs.num_agents // num_envs

    def fields(self):
        """Each agent's (place, whether it carries, planes of the field)."""
        height, width = self.size
        for row in self.observations:
            planes, extra = row[: 5 * 17 * 17].reshape(5, 17, 17), row[5 * 17 * 17 :]
            rows, columns = np.nonzero(planes[2] == 0)
            top, left = rows.min(), columns.min()
            assert (planes[2] == 0).sum() == height * width and rows.max() - top == height - 1
            place = 8 - top, 8 - left
            field = planes[[0, 1, 3, 4], top : top + height, left : left + width].copy()
            assert field[2][place] == 0 and (planes[[0, 1, 3, 4]].sum(axis=(1, 2))
                                             == field.sum(axis=(1, 2))).all()
            assert (extra[5:12].sum() == place[0] * 8 // height
                    and extra[12:19].sum() == place[1] * 8 // width)
            bins = np.argwhere(field[1]) - place
            nearest = bins[np.abs(bins).sum(axis=1) == np.abs(bins).sum(axis=1).min()]
            signs = [(way[0] < 0, way[0] > 0, way[1] < 0, way[1] > 0) for way in nearest]
            assert tuple(extra[1:5].astype(bool)) in signs
            yield place, bool(extra[0]), field


def test_trash_follows_the_rules():
    """Four agents on small fields against the rules written out once more."""
    options = {"num_agents": 4, "num_trash": 14, "num_bins": 2, "width": 8, "height": 6,
               "team": 0.4, "max_steps": 200}
    game, rng = Trash(3, **options), np.random.default_rng(6)
    # cut: of the first episodes, not logged
    dropped, drops, ends, cleared, cut = np.zeros(3, int), 0, 0, 0, 0
    first = np.ones(3, bool)
    game.step(0 * game.actions)
    for _ in range(500):
        views = list(game.fields())
        game.random_actions(rng)
        game.step()
        after = list(game.fields())
        for e in range(3):
            agents = range(4 * e, 4 * e + 4)
            trash, bins = views[4 * e][2][0].copy(), views[4 * e][2][1]
            places, carries = [views[i][0] for i in agents], [views[i][1] for i in agents]
            own = np.zeros(4)
            for k, i in enumerate(agents):
                seen = views[i][2]
                assert np.array_equal(seen[0], trash) and np.array_equal(seen[1], bins)
                others = {places[j]: carries[j] for j in range(4) if j != k}
                assert set(map(tuple, np.argwhere(seen[2]).tolist())) == set(others)
                assert set(map(tuple, np.argwhere(seen[3]).tolist())) == {p for p in others if others[p]}
            for k, i in enumerate(agents):
                step = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)][int(game.actions[i, 0])]
                cell = places[k][0] + step[0], places[k][1] + step[1]
                if not (0 <= cell[0] < 6 and 0 <= cell[1] < 8) or cell in places:
                    continue
                if bins[cell]:
                    own[k], dropped[e] = float(carries[k]), dropped[e] + carries[k]
                    carries[k] = False
                elif not trash[cell]:
                    places[k] = cell
                elif not carries[k]:
                    places[k], carries[k], own[k], trash[cell] = cell, True, 0.25, 0
            np.testing.assert_allclose(game.rewards[agents],
                                       0.6 * own + 0.4 * own.mean(), atol=1e-6)
            drops += (own == 1).sum()
            left = trash.sum() + sum(carries)
            assert (game.terminals[agents] == (left == 0)).all()
            if game.terminals[4 * e] or game.truncations[4 * e]:
                ends, cleared = ends + 1, cleared + int(game.terminals[4 * e])
                cut, first[e] = cut + int(first[e] and game.terminals[4 * e]), False
                now = after[4 * e]
                assert now[2][0].sum() == 14 and now[2][1].sum() == 2 and not now[1]
                continue
            for k, i in enumerate(agents):
                assert after[i][:2] == (places[k], carries[k])
                assert (np.array_equal(after[i][2][0], trash)
                        and np.array_equal(after[i][2][1], bins))
    assert drops > 40 and ends >= 6
    log = game.envs.log()
    assert log["n"] == ends - 3 and log["clear"] == pytest.approx((cleared - cut) / (ends - 3),
                                                                  rel=1e-5)
    assert log["perf"] == pytest.approx(log["score"] / 14, rel=1e-5)


def test_trash_bins_cut_nothing_off():
    game = Trash(40, num_agents=1, num_trash=1, num_bins=9, width=7, height=8)
    for place, _, field in game.fields():
        bins = np.argwhere(field[1])
        assert len(bins) == 9 and field[0].sum() == 1 and not field[1][place]
        assert bins.min() >= 1 and bins[:, 0].max() <= 6 and bins[:, 1].max() <= 5
        gaps = np.abs(bins[:, None] - bins[None]).max(axis=2)
        assert (gaps[~np.eye(9, dtype=bool)] >= 2).all()


def trash_walk(game):
    """To the nearest piece in sight, or where it carries one the way to the bin, else anywhere."""
    rng = np.random.default_rng(int(game.observations[:, 605:].sum()))
    actions = rng.integers(1, 5, len(game.observations))
    for i, row in enumerate(game.observations):
        extra = row[605:]
        if extra[0]:
            ways = 1 + np.flatnonzero(extra[1:5])
        else:
            found = np.argwhere(row[:121].reshape(11, 11)) - 5
            if not len(found):
                continue
            way = found[np.abs(found).sum(axis=1).argmin()]
            ways = [k for k, on in ((1, way[0] < 0), (2, way[0] > 0), (3, way[1] < 0), (4, way[1] > 0)) if on]
        if rng.random() < 0.9:
            actions[i] = rng.choice(ways)
    return actions


def test_trash_is_cleared_by_walking_there():
    rng, scores = np.random.default_rng(7), []
    for policy in (trash_walk, lambda game: rng.integers(0, 5, len(game.actions))):
        game = Vector("trash_pickup", 8)
        for _ in range(300):
            game.step(policy(game))
        scores.append(game.envs.log()["score"])
    assert scores[0] > 30 and scores[1] < 4, scores


# Moba

PLACE, MANA, LEVEL, XP, WAIT, READY, DEAD, AGAIN, WALKS, LANES, ENEMIES = 5, 10, 11, 12, 17, 21, 25, 26, 28, 36, 89
COOLDOWN = 18
SPEEDS, PERIODS = [0.46, 0.46, 0.52, 0.46, 0.48], [7, 7, 6, 7, 6]
RECOVERY = [[60, 75, 60], [40, 50, 80], [50, 35, 90], [40, 50, 70], [35, 90, 50]]
COSTS = [[80, 60, 70], [70, 80, 80], [70, 60, 50], [80, 100, 90], [60, 60, 50]]


class Moba(Vector):
    def __init__(self, num_envs=1, seed=11, **options):
        super().__init__("moba", num_envs, options, seed=seed)
        self.rng = np.random.default_rng(seed)


def test_moba_teams_are_mirror_images():
    """Without chance in the damage two teams that act alike see the same, to the last
    bit, and earn as much."""
    game = Moba(2, self_play=True, spread=0.0, max_ticks=1500, tower_health=60.0, creep_speed=0.6)
    deaths = fallen = 0
    for _ in range(2500):
        game.random_actions(game.rng)
        actions = game.actions.reshape(2, 2, 5, 3)
        # Towards the other base, so that they meet.
        actions[..., 0] = np.where(game.rng.random((2, 1, 5)) < 0.5, 6, actions[:, :1, :, 0])
        actions[:, 1] = actions[:, 0]
        game.step()
        sides = game.observations.reshape(2, 2, 5, -1)
        assert np.array_equal(sides[:, 0], sides[:, 1])
        assert np.array_equal(*game.masks.reshape(2, 2, 5, -1).swapaxes(0, 1))
        rewards = game.rewards.reshape(2, 2, 5)
        np.testing.assert_allclose(rewards[:, 0], rewards[:, 1], atol=1e-6)
        deaths = max(deaths, sides[..., DEAD].sum())
        fallen = max(fallen, (sides[..., LANES + 2 : LANES + 12 : 4] < 1).sum())
    assert deaths > 2 and fallen > 2


def test_moba_heroes_walk_and_trees_stop_them():
    game = Moba(4, self_play=True)
    ways = np.array([(0, -1), (0, 1), (-1, 0), (1, 0), (-1, -1), (1, -1), (-1, 1), (1, 1)], float)
    ways /= np.linalg.norm(ways, axis=1, keepdims=True)
    speeds = np.tile(SPEEDS, 8)[:, None]
    saved, blocked, walked, corners = game.envs.save(), 0, 0, 0
    for k in range(8):
        game.envs.load(saved)
        game.step(np.zeros((40, 3)))
        for _ in range(30):
            before = game.observations.copy()
            game.step(np.tile([k + 1, 0, 0], (40, 1)))
            moved = (game.observations - before)[:, PLACE : PLACE + 2] * 32
            stays = game.terminals + game.truncations == 0
            # for 1.5 tiles, and what is next to it may be a corner
            free = stays & (before[:, WALKS + k] == 1)
            step = speeds * ways[k]
            whole = np.abs(moved - step).max(axis=1) < 1e-4
            walked, corners = walked + (free & whole).sum(), corners + (free & ~whole).sum()
            # or slides along
            assert ((np.abs(moved) < 1e-5) | (np.abs(moved - step) < 1e-4))[stays].all()
            blocked += (~whole).sum()
    assert blocked > 100 and walked > 1000 and corners < 0.05 * walked


def test_moba_acts_cost_time_and_mana_and_illegal_ones_nothing():
    game = Moba(6, self_play=True, max_ticks=2000, tower_damage=1.0)
    seen = np.zeros((5, 4), int)
    for t in range(700):
        game.random_actions(game.rng)
        game.actions[:, 0] = np.where(game.rng.random(60) < 0.5, 6, game.actions[:, 0])
        if t % 5 == 0:
            before, mask = game.observations.copy(), game.masks[:, -5:].astype(bool)
            saved, actions = game.envs.save(), game.actions.copy()
            acts = game.rng.integers(1, 5, 60)
            chosen = mask[np.arange(60), acts]
            game.step(np.column_stack([actions[:, :2], np.where(chosen, 0, acts)]))
            illegal = [array.copy() for array in game.outputs()]
            game.envs.load(saved)
            game.step(np.column_stack([actions[:, :2], 0 * acts]))
            assert all(np.array_equal(one, other)
                       for one, other in zip(illegal, game.outputs(), strict=True))
            game.envs.load(saved)
            game.step(np.column_stack([0 * acts, actions[:, 1], np.where(chosen, acts, 0)]))
            after = game.observations
            ends = game.terminals + game.truncations + after[:, DEAD] > 0
            for i in np.flatnonzero(chosen & ~ends):
                role, act = i % 5, acts[i]
                seen[role, act - 1] += 1
                if act == 1:
                    hasted = PERIODS[role] * 2 // 3
                    assert round(after[i, WAIT] * 10) in (PERIODS[role] - 1, hasted - 1)
                    continue
                assert round(after[i, COOLDOWN + act - 2] * 100) == RECOVERY[role][act - 2] - 1
                spent = (before[i, MANA] - after[i, MANA]) * 1000
                # What flows back in a tick: a five-hundredth, a twentieth at home, and no more than
                # there is room for.
                assert -0.01 <= COSTS[role][act - 2] - spent <= 25
            game.envs.load(saved)
            game.actions[:] = actions
        game.step()
    assert (seen[:, 0] > 0).all() and (seen > 0).sum() > 15, seen


def test_moba_experience_and_levels():
    """With rewards for experience alone, what was earned is what the levels took
    and what is left of it."""
    only = {"reward_win": 0.0, "reward_tower": 0.0, "reward_siege": 0.0, "reward_kill": 0.0,
            "reward_death": 0.0}
    game = Moba(8, demo=True, reward_xp=1.0, frameskip=4, max_ticks=1200, **only)
    takes = 60 * (1 + np.arange(15) * 2 / 3)
    below = np.concatenate([[0], np.cumsum(takes)])
    whole, earned = np.zeros(40, bool), np.zeros(40)
    for _ in range(700):
        game.step(0 * game.actions)
        ends = game.terminals + game.truncations > 0
        earned = np.where(ends, 0, earned + game.rewards)
        whole |= ends
        levels = np.rint(game.observations[:, LEVEL] * 15).astype(int)
        has = below[levels - 1] + game.observations[:, XP] * takes[levels - 1]
        np.testing.assert_allclose(has[whole], earned[whole], rtol=1e-3, atol=0.1)
        assert (levels[ends] == 1).all()
    assert levels.max() >= 4


def test_moba_death_and_return():
    only = {"reward_win": 0.0, "reward_tower": 0.0, "reward_siege": 0.0, "reward_kill": 0.0,
            "reward_xp": 0.0}
    game = Moba(8, reward_death=-1.0, respawn=5, respawn_level=2, max_ticks=3000, **only)
    deaths = returns = 0
    for _ in range(1500):
        before = game.observations.copy()
        game.random_actions(game.rng)
        game.actions[:, 0] = np.where(game.rng.random(40) < 0.7, 6, game.actions[:, 0])
        game.step()
        o, ends = game.observations, game.terminals + game.truncations > 0
        died = (game.rewards == -1) & ~ends
        levels = np.rint(o[:, LEVEL] * 15)
        waits = np.rint(o[died, AGAIN] * 300 - 4) / 2
        assert (o[died, DEAD] == 1).all() and ((waits == levels[died])
                                               | (waits == levels[died] - 1)).all()
        dead = o[:, DEAD] == 1
        assert np.array_equal(game.masks[dead].nonzero()[1].reshape(-1, 3),
                              np.tile([0, 9, 12], (dead.sum(), 1)))
        assert (o[dead, 7] == 0).all() and (game.rewards[(before[:, DEAD] == 1) & dead] == 0).all()
        back = (before[:, DEAD] == 1) & ~dead & ~ends
        assert (o[back, 7] == 1).all()
        places = o[back, PLACE : PLACE + 2] * 32
        assert (np.linalg.norm(places - [-25.5, 25.5], axis=1) < 2.1).all()
        deaths, returns = deaths + died.sum(), returns + back.sum()
    assert deaths > 30 and returns > 30


def test_moba_towers_fall_in_order_and_sight_is_shared():
    game = Moba(6, demo=True, self_play=True, frameskip=4, tower_health=40.0, ancient_health=50.0)
    fallen, unseen, won = 0, 0, 0
    before = game.observations[::5].copy()
    for _ in range(900):
        game.step(0 * game.actions)
        o, ends = game.observations, game.terminals[::5] + game.truncations[::5] > 0
        teams = o.reshape(12, 5, -1)
        enemies = teams[..., ENEMIES:124].reshape(12, 5, 5, 7)
        # dead and seen: the team knows
        assert (enemies[:, :, :, :2] == enemies[:, :1, :, :2]).all()
        assert not (enemies[..., 0] * enemies[..., 1]).any()
        assert not enemies[..., 2:][enemies[..., 1] == 0].any()
        unseen += (enemies[..., 1] == 0).sum()
        lanes = teams[:, 0, LANES:48].reshape(12, 3, 4)
        kept = before[:, LANES:48].reshape(12, 3, 4)
        assert (lanes[..., 2:] <= kept[..., 2:])[~ends].all()
        # the other team's view
        np.testing.assert_array_equal(lanes[::2, :, 2], lanes[1::2, ::-1, 3])
        fallen = max(fallen, (lanes[..., 2] == 0).sum())
        won += game.terminals[::10].sum()
        assert (np.sign(game.rewards[::10]) == -np.sign(game.rewards[5::10]))[game.terminals[::10] == 1].all()
        before = teams[:, 0].copy()
    assert fallen > 2 and unseen > 1000 and won > 0


def test_moba_frameskip_is_as_many_ticks():
    fast, slow = Moba(3, frameskip=5, max_ticks=500), Moba(3, max_ticks=500)
    ended = 0
    for _ in range(250):
        fast.random_actions(fast.rng)
        slow.actions[:] = fast.actions
        fast.step()
        earned, over = np.zeros(15), np.zeros(15, bool)
        for _ in range(5):
            if not over.all():
                slow.step()
                earned += slow.rewards
                over |= slow.terminals + slow.truncations > 0
        if over.any():
            ended += 1
            break  # from here on they are not in step
        assert np.array_equal(fast.observations, slow.observations)
        np.testing.assert_allclose(fast.rewards, earned, atol=1e-5)
    assert ended


def test_moba_script_beats_chance():
    game = Moba(12, frameskip=4)
    game.envs.every_final()  # also of a team that has lost all of its buildings
    for _ in range(1200):
        game.random_actions(game.rng)
        game.step()
        assert (np.abs(game.final_observations[game.terminals == 1]) <= 1).all()
    log = game.envs.log()
    assert log["n"] >= 12 and log["lost"] > 0.7 and log["score"] < -0.85 and log["perf"] < 0.1
    assert log["kills"] < log["deaths"]
