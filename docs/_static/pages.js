// A button on each block of code that copies it; a command that is too long for a screen breaks between words, not at hyphens.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("article .highlight-sh, article .highlight-python")) {
    const code = block.querySelector("pre");
    if (block.matches(".highlight-sh")) keepWords(code);
    if (!navigator.clipboard) continue; // only where the browser trusts the page's address
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.textContent.trimEnd());
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
  nameParts();
  letKeysScroll();
  addEventListener("resize", letKeysScroll);
});

// What the theme and Sphinx leave unsaid to who does not see the page.
function nameParts() {
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = "2";
  document.querySelector(".sidebar-drawer").ariaLabel = "All pages";
  document.querySelector(".toc-drawer").ariaLabel = "On this page";
  for (const part of document.querySelectorAll("dt.sig dl, dt.sig dd")) {
    const line = document.createElement("span"); // a list of definitions that defines nothing
    line.className = part.matches("dd") ? "argument" : "arguments";
    line.append(...part.childNodes);
    part.replaceWith(line);
  }
}

// What scrolls by itself does so by keys, too.
function letKeysScroll() {
  for (const box of document.querySelectorAll("article pre, .table-wrapper, article p:has(> img:only-child)")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

function keepWords(code) {
  const texts = [];
  for (const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT); walker.nextNode(); ) texts.push(walker.currentNode);
  for (const text of texts) {
    const parts = text.data.split(/(\S*-\S*)/).map((part) => {
      if (!part.includes("-")) return part;
      const word = document.createElement("span");
      word.className = "word";
      word.textContent = part;
      return word;
    });
    text.replaceWith(...parts);
  }
}
