"""Whether what ``template.kwargs`` says has any effect on the rows."""

from __future__ import annotations

from luthier.check.verify_compared import answers_of
from luthier.check.verify_template import PlainTemplate
from luthier.errors import RowError
from luthier.records import Conversation, Document, Row
from luthier.templating.limits import TemplateSettings

MAX_ROWS_SEEN = 1000  # a variable that changes none of so many conversations is reported


class KwargsUse:
    """Watches rows go by until each variable was seen to change the text, or the generation prompt, of one."""

    def __init__(self, template: PlainTemplate | None, settings: TemplateSettings) -> None:
        """One template for each variable, that lacks it. ``settings`` are those that the run itself gives."""
        self._template, self._settings = template, settings
        self._num_seen = 0
        self._without: dict[str, PlainTemplate] = {}
        if template is not None:
            for name in template.kwargs:
                rest = {other: value for other, value in template.kwargs.items() if other != name}
                self._without[name] = PlainTemplate(
                    template.source, special_tokens=template.special_tokens, kwargs=rest, settings=template.settings
                )

    def see(self, row: Row) -> None:
        """Look at one more row."""
        if not self._without or isinstance(row, Document) or self._num_seen >= MAX_ROWS_SEEN:
            return
        if not isinstance(row, Conversation):
            row = Conversation(messages=(*row.prompt, *answers_of(row)[0]), tools=row.tools)
        self._num_seen += 1
        assert self._template is not None, "there are variables, so there is a template"
        with_all = _texts(self._template, row)
        for name in [name for name, template in self._without.items() if _texts(template, row) != with_all]:
            del self._without[name]

    @property
    def warnings(self) -> list[str]:
        """A sentence for each variable that changed nothing, and one for a template with a clock."""
        template = self._template
        clock = (
            None
            if template is None
            else self._settings.clock_note(template.source, template.variables, template.kwargs.keys())
        )
        return [
            *([clock] if clock else []),
            *(
                f"template.kwargs.{name} changes the text of none of {self._num_seen} conversations: "
                "it says what the template does anyway, or the template does not use it here"
                for name in self._without
                if self._num_seen
            ),
        ]


def _texts(template: PlainTemplate, row: Conversation) -> tuple[str, str] | str:
    try:
        text = template.render(row.messages, row.tools)
        return text, template.render(row.messages, row.tools, generation_prompt=True)
    except RowError as error:
        return str(error)
